"""The client for asyncio. `carrel._sync` is made from this directory by `scripts/unasync`, except for its `_io.py`."""
