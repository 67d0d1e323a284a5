"""``kvk demo`` on the data inside the package."""

from __future__ import annotations

import json

from click.testing import CliRunner

from kvkernels.bench.demo import PAIRS, TEXTS, capture
from kvkernels.cli import main


def test_the_captures_are_what_the_readme_says() -> None:
    for name, tokens in (("prose", 960), ("code", 512)):
        text = capture(name)
        assert text.rows.k.shape == text.rows.v.shape == (tokens, 3, 64)
        assert text.rows.q.shape == (tokens, 9, 64)
        assert "SmolLM2-135M-Instruct (Apache-2.0)" in text.meta


def test_demo_json_says_the_truth() -> None:
    done = CliRunner().invoke(main, ["demo", "--json", "--quick"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(PAIRS) * len(TEXTS)
    for line in found:
        assert line["schema"] == "kvk.demo/1"
        assert (line["route"], line["entry"]) == ("native", "cpu/attend_decode")
        assert line["record_bytes"] < line["f16_bytes"]
        # What is lost is lost by the codec, not by the kernel.
        assert line["kernel_error"] < line["output_error"]
        assert line["tiled_n_kv"] is None
    for text in TEXTS:
        by_width = {(x["k"], x["v"]): x for x in found if x["text"] == text}
        errors = [by_width[f"kvarn{b}", f"kvarn{b}"]["output_error"] for b in (2, 3, 4, 5, 6, 8)]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 0.01


def test_the_table_is_printed() -> None:
    done = CliRunner().invoke(main, ["demo", "--quick"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "prose" in done.stdout
    assert "not where compression pays" in done.stdout
