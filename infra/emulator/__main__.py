"""Run the emulator, or deploy a stage to a running one.

python -m infra.emulator serve --port 0 --state-file .trainyard/emulator.json [--executor docker --registry HOST:PORT]
python -m infra.emulator deploy --endpoint http://localhost:PORT [--stage dev]    (reads AWS_ACCESS_KEY_ID, …)
"""

import argparse
import logging
import signal
import sys
from pathlib import Path

from infra.emulator.errors import EmulatorError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.emulator", description="AWS on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)

    serve_parser = commands.add_parser("serve", help="run the server in the foreground")
    serve_parser.add_argument("--port", type=_port, default=0, help="port to listen on (default: any free port)")
    serve_parser.add_argument(
        "--state-file",
        type=Path,
        metavar="FILE",
        required=True,
        help="file for the address and credentials; written when the server is ready, deleted on exit",
    )
    serve_parser.add_argument(
        "--executor",
        choices=("process", "docker"),
        default="process",
        help="run jobs as local processes or in Docker (default: process)",
    )
    serve_parser.add_argument(
        "--registry", metavar="HOST:PORT", help="container registry to use for ECR (default: none)"
    )
    serve_parser.add_argument("--keep", type=Path, metavar="DIR", help="save S3 objects here (default: in memory only)")
    serve_parser.add_argument("--exit-with-pid", type=int, metavar="PID", help="exit when process PID exits")

    deploy_parser = commands.add_parser("deploy", help="bootstrap and deploy one stage")
    deploy_parser.add_argument(
        "--endpoint", required=True, metavar="URL", help="address of the emulator, from its state file"
    )
    deploy_parser.add_argument("--stage", help="stage to deploy, from infra/settings.py (default: dev)")

    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line per request would bury the rest
    try:
        if options.command == "serve":
            from infra.emulator.server import serve

            serve(
                port=options.port,
                state_file=options.state_file,
                executor=options.executor,
                exit_with_pid=options.exit_with_pid,
                registry=options.registry,
                keep=options.keep,
            )
            return 0
        from infra.emulator.deploy import deploy

        # Handle SIGTERM like Ctrl-C: deploy() then stops the CLI and every process it started.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return deploy(endpoint=options.endpoint, stage=options.stage)
    except KeyboardInterrupt:
        return 130
    except EmulatorError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text} is not a port; ports are 0 to {2**16 - 1}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
