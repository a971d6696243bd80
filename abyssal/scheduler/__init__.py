"""Which rows run in the next step. Plain Python over counts and ids: no tensor, no clock, no model.

`scheduler` keeps the requests and takes the steps, `policy` holds what could be decided otherwise (order, victims,
headroom), and `stopping` says when a sequence ends.
"""
