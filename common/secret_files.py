"""Who else may read a file that holds a secret."""

import os


def is_exposed(found: os.stat_result) -> bool:
    """Whether anybody but its owner may read or change it.

    The group of a file that is root's may read it: this is how Kubernetes hands a secret to a
    process that is not root, which can own no file of a mounted volume.
    """
    allowed = 0o740 if found.st_uid == 0 and os.geteuid() != 0 else 0o700
    return bool(found.st_mode & 0o777 & ~allowed)
