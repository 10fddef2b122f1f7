"""The start set by hand looks facts up before any training; the ordinary start does not."""

import torch

from tools.finder.data import FIRST_DIGIT, BatchOrder, SequenceBuilder
from tools.finder.model import Finder, FinderShape
from tools.finder.wiring import wire


@torch.no_grad()
def share_right(model: Finder, builder: SequenceBuilder) -> float:
    """Share of the first digits that the model prefers to the nine others."""
    batch = builder.batch(BatchOrder(0, 0, 8, 224))
    tokens = torch.from_numpy(batch.tokens).long()
    logits = model.lm_head(model(tokens[:, :-1])[0])
    digits = torch.from_numpy(builder.facts.first_digits)
    said = digits[logits[..., digits].argmax(-1)]
    asked = torch.from_numpy(batch.kinds[:, 1:]) == FIRST_DIGIT
    return float((said == tokens[:, 1:])[asked].float().mean())


def test_the_wired_model_looks_up(builder: SequenceBuilder) -> None:
    wide = FinderShape(vocab=1024, layers=2)
    model = Finder(wide)
    assert share_right(model, builder) < 0.5
    wire(model)
    assert share_right(model, builder) > 0.9
