"""When a sequence ends, judged after each token that was appended to it. Stop strings need text and are found elsewhere."""

from __future__ import annotations

from ..core.request import FinishReason, Request


def check_stop(request: Request, max_total_tokens: int) -> tuple[FinishReason, int | None] | None:
    """Judge a request by its newest output token.

    A token that ends the sequence counts before a limit that is reached with it. Before `min_tokens` tokens only the limits
    count, unless the request is under a constraint: then an end is drawn so early only because nothing else may follow.

    Args:
        max_total_tokens: limit on prompt plus output.

    Returns:
        The reason and, if an id of `stop_token_ids` ended it, that id; None to go on.
    """
    params = request.params
    token_id = request.output_token_ids[-1]
    num_output_tokens = len(request.output_token_ids)
    if num_output_tokens >= params.min_tokens or request.constraint is not None:
        if token_id in request.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
    reached_max_tokens = params.max_tokens is not None and num_output_tokens >= params.max_tokens
    if reached_max_tokens or request.num_tokens >= max_total_tokens:
        return FinishReason.LENGTH, None
    return None
