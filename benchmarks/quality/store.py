"""Finished samples in a file of JSON lines. A run appends them one by one; a restarted run reads them and goes on."""
import json
from pathlib import Path

KEY = ("task", "length", "index", "method", "budget", "patch")


def key(row: dict) -> str:
    """What makes two rows the same sample under the same setting, as far as it was given: defaults change."""
    return json.dumps([row[k] for k in KEY], sort_keys=True)


class Store:
    """The rows of one file. The first line says what made it: other hardware or another model must not add to it."""

    def __init__(self, path: Path, header: dict):
        self.path = path
        self.rows: dict[str, dict] = {}
        if path.exists() and path.stat().st_size:
            self._take_up(header)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(header)

    def _take_up(self, header: dict) -> None:
        check_file(self.path, header)
        lines, whole = read(self.path)
        with self.path.open("r+b") as f:
            f.truncate(whole)  # a line that was cut off when the run was stopped
        for row in lines[1:]:
            self._take(row)
        if heads(lines)[-1]["options"] != json.loads(json.dumps(header["options"])):  # a tuple comes back as a list
            self._write(header)

    def _take(self, row: dict) -> None:
        if "benchmark" not in row:
            self.rows[key(row)] = row

    def had(self, row: dict) -> dict | None:
        """This sample, where it was measured with the hyper-parameters that the same setting means today."""
        found = self.rows.get(key(row))
        means = [json.dumps(r.get("hyper"), sort_keys=True) for r in (found or {}, row)]
        return found if means[0] == means[1] else None

    def add(self, row: dict) -> None:
        self._write(row)
        self._take(row)

    def _write(self, line: dict) -> None:
        with self.path.open("a") as f:
            f.write(json.dumps(line) + "\n")


def check_file(path: Path, header: dict) -> None:
    """Refuse a file of another benchmark, environment or model. A header without a model is of a model that is not
    loaded."""
    if not path.exists() or not path.stat().st_size:
        return
    lines, _ = read(path)
    if not lines or lines[0].get("benchmark") != header["benchmark"]:
        raise ValueError(f"{path} is not a file of `torchsparsekv {header['benchmark']}`: choose another file")
    for name in {"environment", "model"} & header.keys():
        had, has = lines[0][name], header[name]
        other = [k for k in {**had, **has} if had.get(k) != has.get(k)]
        if other:
            was, now = ({k: x.get(k) for k in other} for x in (had, has))
            raise ValueError(f"{path} was made with {was}, this run has {now}: choose another file")


def heads(lines: list[dict]) -> list[dict]:
    """The lines that head a run; the others are samples."""
    return [x for x in lines if "benchmark" in x]


def read(path: Path) -> tuple[list[dict], int]:
    """The lines of a file, and the bytes they take; a last line without an end is left out."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    out = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            out.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            raise ValueError(f"{path}, line {number}, is not JSON: {e}") from e
        if not isinstance(out[-1], dict):
            raise ValueError(f"{path}, line {number}, is not an object")
    return out, whole
