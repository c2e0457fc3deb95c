"""The IAM permissions for the AWS calls in source files, found in the source itself."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from botocore import xform_name
from botocore.session import Session

from tests.support.infra.synthesis import ROOT

_S3_OPERATIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "HeadObject": "s3:GetObject",
    "UploadFile": "s3:PutObject",
    "UploadFileobj": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "DownloadFile": "s3:GetObject",
    "DownloadFileobj": "s3:GetObject",
}
"""Operations whose permission has another name
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html#mpuAndPermissions for parts).
"""


def permissions_of(files: Iterable[Path]) -> set[str]:
    """Return the permissions for the calls in `files` through the clients of jobs.aws.connection.Aws."""
    clients = dict(_clients())
    assert {"batch", "s3", "ssm", "logs"} <= clients.keys()
    operations = {name: _operations(service) for name, service in clients.items()}
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=client), attr=method), args=arguments):
                    if client not in clients:
                        continue
                    if method == "get_paginator":
                        assert isinstance(arguments[0], ast.Constant)
                        method = str(arguments[0].value)
                    operation = operations[client].get(method, method.title().replace("_", ""))
                    found.add(_permission(clients[client], operation))
    return found


def _clients() -> Iterator[tuple[str, str]]:
    """Yield each client attribute of jobs.aws.connection.Aws with its service."""
    for node in ast.walk(ast.parse((ROOT / "jobs/aws/connection.py").read_text())):
        if isinstance(node, ast.FunctionDef):
            for service in re.findall(r"_session\.client\('([a-z0-9-]+)'", ast.unparse(node)):
                yield node.name, service


def _operations(service: str) -> dict[str, str]:
    """Return the API operations by the names of boto3's methods."""
    model = Session().get_service_model(service)
    return {xform_name(operation): operation for operation in model.operation_names}


def _permission(service: str, operation: str) -> str:
    return _S3_OPERATIONS.get(operation, f"{service.replace('-', '')}:{operation}")
