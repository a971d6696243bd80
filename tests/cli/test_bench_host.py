"""The measurement of Python's share runs the whole engine, and reports each part."""

from __future__ import annotations

import json

from abyssal.cli.main import main


def test_reports_every_part(capsys) -> None:
    assert main(["bench", "host", "--requests", "1", "3", "--steps", "5"]) == 0
    costs = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [cost["num_requests"] for cost in costs] == [1, 3]
    for cost in costs:
        parts = [cost[name] for name in ("schedule_us", "prepare_us", "update_us")]
        assert min(parts) > 0
        assert abs(sum(parts) - cost["total_us"]) < 1e-6
