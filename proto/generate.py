"""Regenerates common/pb from the .proto files; `--check` only compares and exits 1 on drift.

The virtual include root makes the stubs import `common.pb.v1` directly, so no text is patched. The
generator is pinned (grpcio-tools 1.76.0, dev extra): its stubs run on protobuf 6.31 up to 7.x.
"""

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ("drafter", "verifier")
OUTPUTS = [f"{name}_{kind}" for name in PROTOS for kind in ("pb2.py", "pb2.pyi", "pb2_grpc.py")]


def generate(out: Path) -> None:
    """Writes common/pb/v1/*_pb2* under `out`."""
    args = [
        "protoc",
        f"-Icommon/pb/v1={ROOT / 'proto/dspark/v1'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *(f"common/pb/v1/{name}.proto" for name in PROTOS),
    ]
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed; its messages are above")


def drifted() -> list[str]:
    """Names of checked-in stubs that differ from what the .proto files give."""
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh, kept = Path(tmp) / "common/pb/v1", ROOT / "common/pb/v1"
        return [
            name
            for name in OUTPUTS
            if not (kept / name).exists()
            or not filecmp.cmp(fresh / name, kept / name, shallow=False)
        ]


def main() -> None:
    if "--check" not in sys.argv[1:]:
        return generate(ROOT)
    if names := drifted():
        raise SystemExit(
            f"stubs differ from proto/: {', '.join(names)}; run python proto/generate.py"
        )


if __name__ == "__main__":
    main()
