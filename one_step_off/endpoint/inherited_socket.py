"""The gateway's port, kept open by the driver.

The driver opens the port and lends it to the gateway's process. So the port stays the same, and
open, when that process is killed: clients that connect meanwhile wait for its successor, and no
other program can take the port.
"""

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time

from one_step_off.cluster.process_cleanup import RUN_FOLDER_VARIABLE
from one_step_off.config.errors import ConfigError
from one_step_off.endpoint.guarded_server import open_listener

MAX_PATH_CHARS = 100
"""The kernel's limit for the path of a local socket is 107."""

LEND_TIMEOUT_S = 10.0
FORMER_ENDS_S = 3.0
RETRY_S = 0.1


class InheritedSocket:
    """A socket that listens, and a thread that lends it to processes of this user.

    Attributes:
        host, port: where it listens.
        path: the local socket at which `borrow_port` gets it.
    """

    def __init__(self, host: str, port: int, preferred_port: int = 0) -> None:
        """
        Args:
            port: 0: a free one.
            preferred_port: that the attempt before had, to use instead of any free one. It is
                waited for if it is in use.

        Raises:
            ConfigError: this machine cannot listen there.
        """
        self.host = host
        self._listening = _listen(host, port, preferred_port)
        self.port = self._listening.getsockname()[1]
        # Removed after the run, even after a kill. The variable outlives an earlier run's folder.
        run_folder = os.environ.get(RUN_FOLDER_VARIABLE, "")
        parent = run_folder if os.path.isdir(run_folder) else None
        folder = tempfile.mkdtemp(prefix="ose_", dir=parent)  # only this user may enter
        if len(folder) > MAX_PATH_CHARS - len("/port"):
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="ose_", dir="/tmp")
        self._folder = folder
        self.path = os.path.join(folder, "port")
        self._lender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lender.bind(self.path)
        self._lender.listen()
        threading.Thread(target=self._lend, name="endpoint port", daemon=True).start()

    def _lend(self) -> None:
        while True:
            try:
                borrower, _ = self._lender.accept()
            except OSError:  # closed
                return
            with borrower, contextlib.suppress(OSError):
                socket.send_fds(borrower, [b"."], [self._listening.fileno()])

    def close(self) -> None:
        """Close the port."""
        with contextlib.suppress(OSError):
            self._lender.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._lender.close()
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def borrow_port(path: str) -> socket.socket:
    """The listening socket of the `InheritedSocket` at this path. Raises OSError: it is closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lender:
        lender.settimeout(LEND_TIMEOUT_S)
        lender.connect(path)
        _, descriptors, _, _ = socket.recv_fds(lender, 1, 1)
    if not descriptors:
        raise OSError(f"{path}: the port is closed")
    listening = socket.socket(fileno=descriptors[0])
    listening.setblocking(False)
    return listening


def _listen(host: str, port: int, preferred_port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError."""
    wanted = port or preferred_port
    if wanted and wanted == preferred_port:
        # The processes of the attempt before may not have ended yet.
        deadline = time.monotonic() + FORMER_ENDS_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                return open_listener(host, wanted)
            time.sleep(RETRY_S)
    try:
        return open_listener(host, port)
    except OSError as error:
        raise ConfigError(
            f"agent.endpoint_host={host} agent.endpoint_port={port}: {error.strerror or error}; "
            "name an address of this machine and a free port, or 0"
        ) from error
