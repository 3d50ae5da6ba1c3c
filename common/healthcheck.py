"""Asks a port of this container whether it is well: ``python -m common.healthcheck PORT [PATH]``.

The port is a process' admin port, or nats-server's for monitoring (then with its path). Exit
status 0 for an answer of 200, else 1 with one line that says what came instead. The standard
library alone: it runs every few seconds beside the process it asks about.
"""

import http.client
import sys

_TIMEOUT_S = 3.0


def problem(port: int, path: str = "/health") -> str:
    """What is wrong; empty when nothing is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except OSError as error:
        return f"port {port} does not answer: {error.strerror or error}"
    except http.client.HTTPException as error:
        return f"port {port} does not speak HTTP: {type(error).__name__}"
    finally:
        connection.close()
    if status == http.client.SERVICE_UNAVAILABLE:
        return "not ready; its log says why"
    return "" if status == http.client.OK else f"port {port} answers {status}"


if __name__ == "__main__":
    found = problem(int(sys.argv[1]), *sys.argv[2:3])
    sys.stdout.write(f"{found or 'ready'}\n")
    sys.exit(1 if found else 0)
