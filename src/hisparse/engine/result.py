"""What became of a request."""

from dataclasses import dataclass, field, replace

import torch

from hisparse.engine.request import FinishReason, Request
from hisparse.engine.reuse import ReusedTokens


@dataclass(frozen=True, slots=True)
class RequestResult:
    """A request's outcome, finished or so far. Times in seconds; `tpot_s` is the mean after the first token.

    `reused`: where the KV of the prompt came from. `logits`: float32 `[vocab]` for each output token, kept only when
    the engine was asked to.
    """

    request_id: str
    prompt_tokens: int
    output_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    ttft_s: float | None
    tpot_s: float | None
    reused: ReusedTokens = field(default_factory=ReusedTokens)
    logits: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, request: Request, text: str) -> "RequestResult":
        """As things stand. `text`: what was generated, decoded."""
        ttft = tpot = None
        if request.first_token is not None and request.last_token is not None:
            ttft = request.first_token - request.arrival
            if request.num_output > 1:
                tpot = (request.last_token - request.first_token) / (request.num_output - 1)
        return cls(
            request_id=request.request_id,
            prompt_tokens=request.num_prompt,
            output_ids=tuple(request.output),
            text=text,
            finish_reason=request.finish_reason,
            ttft_s=ttft,
            tpot_s=tpot,
            reused=replace(request.reused),
            logits=tuple(request.logits),
        )
