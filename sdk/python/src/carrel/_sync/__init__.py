"""The blocking client. Made from `carrel._async` by `scripts/unasync`, except for `_io.py`: change it there."""
