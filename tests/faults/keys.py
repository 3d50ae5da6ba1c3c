"""The API keys of the shared cluster."""

ALICE, MALLORY = "sk-alice-0123456789abcdef", "sk-mallory-0123456789abcdef"
API_KEYS = f"""
- {{key: {ALICE}, tenant: alice}}
- {{key: {MALLORY}, tenant: mallory}}
"""
