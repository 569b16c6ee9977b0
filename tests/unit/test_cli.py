"""`eyas doctor` and `eyas verify`; verify on a run made by hand is in tests/workflow."""

from __future__ import annotations

import json

from eyas.cli.main import main


def test_doctor_reports_what_is_there(capsys, tmp_path) -> None:
    assert main(["doctor", "--json", "--results", str(tmp_path / "results")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ready"] and facts["problems"] == []
    assert facts["versions"]["torch"] and facts["cpus"] >= 1
    assert facts["file_system"] == {"write": True, "lock": True, "hard_links": True, "preallocate": True}
    assert not (tmp_path / "results").exists()


def test_doctor_says_what_is_missing(capsys, tmp_path, monkeypatch) -> None:
    from eyas.cli import doctor

    monkeypatch.setitem(doctor.NEEDS, "engine transformers", ["torch", "no-such-package"])
    assert main(["doctor", "--results", str(tmp_path)]) == 1
    assert "no-such-package" in capsys.readouterr().out


def test_verify_of_no_run(capsys, tmp_path) -> None:
    assert main(["verify", "nothing", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no run 'nothing'" in error and "Traceback" not in error
