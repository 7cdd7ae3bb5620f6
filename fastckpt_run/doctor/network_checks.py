"""Checks of the network of a job of several nodes: interfaces, this host's name, endpoints, the secret."""

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing

import psutil

from fastckpt._core.config import SECRET_VARIABLE, copy_of_environment
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, ok, problem, warning
from fastckpt_run.rendezvous.signing import secret_of

CONNECT = 2.0
"""Seconds that a host has to accept a connection, or to refuse it."""
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interfaces(_: Subject) -> Iterator[Diagnosis]:
    """Interfaces of this host, and those that variables demand."""
    states = {name: state.isup for name, state in psutil.net_if_stats().items()}
    up = sorted(name for name, is_up in states.items() if is_up)
    yield ok("interfaces", f"up: {', '.join(up) or 'none'}")
    environment = copy_of_environment()
    for variable, is_demanded in ((_GLOO, _as_gloo), (_NCCL, _as_nccl)):
        if not (text := environment.get(variable, "").strip()):
            continue
        remedy = f"Set {variable} to one of {', '.join(up)}, or unset it"
        for name in _names(text):
            found = [each for each in states if is_demanded(each, name, text)]
            if not found:
                yield problem("interfaces", f"{variable} is {text!r}, but no interface is named {name}", remedy)
            elif not any(states[each] for each in found):
                yield problem("interfaces", f"{variable} is {text!r}, but {', '.join(found)} is down", remedy)
            else:
                yield ok("interfaces", f"{variable} is {text!r}: {', '.join(found)}")


def host_name(subject: Subject) -> Iterator[Diagnosis]:
    """The address by which the other nodes would reach this one."""
    name = socket.getfqdn()
    try:
        addresses = _addresses(name)
    except OSError:
        addresses = []
    remedy = "Give this node an address that the others reach: --local-addr of torchrun, or a name in DNS or /etc/hosts"
    if not addresses:
        found = f"{name} has no address here, and other nodes may not find it either"
    elif all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses):
        found = f"{name} is {', '.join(addresses)}, which leads each other node to itself"
    else:
        yield ok("host name", f"{name} is {', '.join(addresses)}")
        return
    if _is_of_several(subject):
        yield warning("host name", found, remedy)
    else:
        yield ok("host name", f"{found}; a node alone does not mind")


def endpoints(subject: Subject) -> Iterator[Diagnosis]:
    """Each endpoint: whether it has an address, is this host, and whether something listens there."""
    if not subject.endpoints:
        return
    # Imported here: they take torch, which the other checks do without.
    from fastckpt_run.rendezvous.endpoints import Endpoints
    from fastckpt_run.torchrun_patches import is_this_host

    places = Endpoints(subject.endpoints, is_here=is_this_host)
    for host, port, is_here in places.places():
        yield _endpoint(host, port, is_here=is_here, alone=len(places) == 1)


def secret(subject: Subject) -> Iterator[Diagnosis]:
    """Check that the agents of the job share a secret, which is never shown."""
    given = secret_of(subject.job)
    if given:
        where = subject.job.secret_file or SECRET_VARIABLE
        yield ok("secret", f"in {where}, {len(given)} bytes")
    elif _is_of_several(subject):
        text = "none: whoever reaches the store of the rendezvous can take part in the job"
        yield warning(
            "secret", text, "openssl rand -hex 32 > job.secret; chmod 600 job.secret; --fast-secret-file job.secret"
        )
    else:
        yield ok("secret", "none, and one node needs none")


def _endpoint(host: str, port: int, *, is_here: bool, alone: bool) -> Diagnosis:
    name, where = f"endpoint {host}:{port}", "this host" if is_here else "another host"
    try:
        address = _addresses(host)[0]
    except (OSError, IndexError):
        return problem(
            name, f"{host} has no address here: no such name", "Correct the name, or add it to DNS or /etc/hosts"
        )
    text = f"{where}, {address}" + (f" by {_interface_to(address, port)}" if not is_here else "")
    if port == 0:
        return ok(name, f"{text}: a free port is taken")
    try:
        with closing(socket.create_connection((host, port), timeout=CONNECT)):
            pass
    except ConnectionRefusedError:
        if is_here:
            return ok(name, f"{text}: nothing listens, so the agent here would hold the store")
        return warning(
            name, f"{text}: nothing listens there yet", "Start the agent of that host; agents wait for each other"
        )
    except OSError as error:
        found = f"{text}: it does not answer ({error.strerror or error})"
        remedy = f"Open port {port} between the nodes, and look whether that host is up"
        return problem(name, found, remedy) if alone and not is_here else warning(name, found, remedy)
    return ok(name, f"{text}: something listens; a launch joins it if it is the store of this job")


def _is_of_several(subject: Subject) -> bool:
    return subject.nodes > 1 or (bool(subject.endpoints) and not subject.nodes)


def _addresses(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _interface_to(address: str, port: int) -> str:
    """The interface that packets to an address take; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port or 1))
        except OSError as error:
            return f"no interface ({error.strerror})"
        local = probe.getsockname()[0]
    owners = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address.partition("%")[0] == local.partition("%")[0] for each in addresses)
    ]
    return f"{', '.join(owners) or 'an unknown interface'} ({local})"


def _names(text: str) -> Sequence[str]:
    return [name for name in text.lstrip("^=").split(",") if name]


def _as_gloo(interface: str, name: str, _: str) -> bool:
    return interface == name


def _as_nccl(interface: str, name: str, text: str) -> bool:
    """NCCL takes prefixes; = before them means whole names, and ^ all others, which need not be there."""
    return text.startswith("^") or (interface == name if text.startswith("=") else interface.startswith(name))
