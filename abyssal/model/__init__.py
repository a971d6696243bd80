"""The mathematics of DeepSeek-V4.1-Flash over `abyssal.ops`, to be read from `flash.py` downwards.

Nothing here knows a vendor, a scheduler or where caches come from; `common.py` states what is asked of both.
"""
