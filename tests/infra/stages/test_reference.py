"""The tables of the settings' keys, and the page that holds them."""

import subprocess
import sys

from tests.support.infra.synthesis import ROOT


def test_the_page_holds_what_the_module_prints() -> None:
    command = [sys.executable, "-m", "infra.stages.reference"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    held = (ROOT / "infra/docs/settings.md").read_text().partition("<!-- keys -->")[2].partition("<!-- /keys -->")[0]
    assert held.strip() == printed.strip(), "python -m infra.stages.reference, into infra/docs/settings.md"
    assert "| `max_nodes` | `2` | Accelerator instances on Spot that each team may have at once, " in printed
    assert "| `teams` | *needed* | " in printed
