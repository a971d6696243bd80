"""`abyssal bench ceilings` where there is no card."""

from __future__ import annotations

import pytest
import torch

from abyssal.cli.main import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys):
    assert main(["bench", "ceilings"]) != 0
    assert "no NVIDIA card" in capsys.readouterr().err
