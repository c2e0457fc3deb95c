"""The emulator and the CDK CLI against it.

python -m infra.emulator serve --port 0 --state-file .trainyard/emulator.json [--executor docker --registry HOST:PORT]
python -m infra.emulator deploy --endpoint http://localhost:PORT [--stage dev]    (credentials: as AWS_ACCESS_KEY_ID …)
"""

import argparse
import logging
import signal
import sys
from pathlib import Path

from infra.emulator.errors import EmulatorError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.emulator", description="An AWS on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)

    serve_parser = commands.add_parser("serve", help="run the server in the foreground")
    serve_parser.add_argument("--port", type=_port, default=0, help="0, the default: any that is free")
    serve_parser.add_argument(
        "--state-file",
        type=Path,
        required=True,
        help="gets address and credentials once the server answers; removed at its end",
    )
    serve_parser.add_argument("--executor", choices=("process", "docker"), default="process", help="what runs jobs")
    serve_parser.add_argument("--registry", metavar="HOST:PORT", help="the container registry that stands in for ECR's")
    serve_parser.add_argument("--keep", type=Path, metavar="DIR", help="keep what S3 holds there (default: in memory)")
    serve_parser.add_argument("--exit-with-pid", type=int, help="end when that process has ended")

    deploy_parser = commands.add_parser("deploy", help="cdk bootstrap and cdk deploy of one stage")
    deploy_parser.add_argument("--endpoint", required=True, help="as the state file has it")
    deploy_parser.add_argument("--stage", help="a name in infra/settings.py; dev by default")

    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request hides the rest
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

        # As Ctrl-C: an exception, on which deploy() stops the CLI and all it started.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return deploy(endpoint=options.endpoint, stage=options.stage)
    except KeyboardInterrupt:
        return 130
    except EmulatorError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text} is not a port: they go from 0 to {2**16 - 1}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
