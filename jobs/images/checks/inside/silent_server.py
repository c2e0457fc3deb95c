"""An endpoint that takes a connection and never answers: what asks it waits. Takes the port; tells of the first one."""

import json
import socket
import sys

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", json.loads(sys.argv[1]))) as server:
        connections = [server.accept()]
        print("asked", flush=True)
        while True:
            connections.append(server.accept())
