"""A client in a process that forks: parent and child have nothing of each other's, whenever it forks."""

from asking import hit
from forking import numbered, run_forking

_FORKING = """
import os, sys
from hypercache_connector import Client
from hypercache_protocol.messages import Locate

def size(client, uri):
    return client.exchange([Locate(uri=uri)])[0].object_size

client = Client(sys.argv[1], 10.0)
assert size(client, "parent") == 1
child = os.fork()
if child == 0:
    os._exit(0 if size(client, "child") == 2 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert size(client, "parent") == 1
"""


@numbered
def test_a_forked_child_never_shares_its_parents_connection(scripted, numbers: str) -> None:
    scripted.objects = {"parent": hit(1), "child": hit(2)}
    run_forking(_FORKING, scripted.socket_path, numbers)
    assert scripted.connections_accepted == 2  # the parent's, kept, and one of the child's own


_TWO_THREADS_OF_A_CHILD = """
import os, sys, threading
from hypercache_connector import Client

class LateFor:
    def __init__(self, lock):
        self.lock, self.here, self.go = lock, threading.Event(), threading.Event()

    def __enter__(self):
        if threading.current_thread() is late and not self.here.is_set():
            self.here.set()
            self.go.wait()
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)

client = Client(sys.argv[1], 10.0)
client.ping()
child = os.fork()
if child == 0:
    late = threading.Thread(target=client.ping)
    lock = client._lock = LateFor(client._lock)
    late.start()
    lock.here.wait()
    connection = client.borrow()
    lock.go.set()
    late.join()
    os._exit(0 if not connection.is_hung_up() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_no_thread_of_a_forked_child_closes_the_connection_of_another(scripted) -> None:
    run_forking(_TWO_THREADS_OF_A_CHILD, scripted.socket_path)


_CLOSING_CHILD = """
import os, sys
from hypercache_connector import Client

client = Client(sys.argv[1], 10.0)
connection = client.borrow()  # as busy as with an exchange
child = os.fork()
if child == 0:
    client.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert not connection.is_out_of_step()
client.close()
assert connection.is_out_of_step()
"""


def test_a_forked_child_that_closes_breaks_off_nothing_of_its_parents(scripted) -> None:
    run_forking(_CLOSING_CHILD, scripted.socket_path)


_FORKED_WHILE_ANNOUNCED = """
import os, sys, threading
from hypercache_connector import Client

announcing, forked = threading.Event(), threading.Event()

def announce():
    if threading.current_thread() is thread:
        announcing.set()
        forked.wait()

client = Client(sys.argv[1], 10.0, on_new_instance=announce)
thread = threading.Thread(target=client.ping)
thread.start()
announcing.wait()
child = os.fork()
if child == 0:
    client.ping()
    os._exit(0)
try:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
finally:
    forked.set()
"""


def test_a_child_that_is_forked_while_a_new_instance_is_announced_can_ask(scripted) -> None:
    run_forking(_FORKED_WHILE_ANNOUNCED, scripted.socket_path)
