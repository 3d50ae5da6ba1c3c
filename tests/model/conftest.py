from collections.abc import Callable

import pytest
from support.tiny_models import TinyModel, make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Tiny models by name, each made once. The first one imports transformers (8 s)."""
    made: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in made:
            made[name] = make_tiny_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get
