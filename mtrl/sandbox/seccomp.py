"""The system calls that are denied to commands in the sandbox, as a seccomp filter for `bwrap --seccomp`.

Namespaces and limits do not cover everything: no limit counts the memory of `memfd_create`, System V memory and
io_uring, that of a shared mapping without a file of which a process has unmapped all but one page, nor that of pages
which `vmsplice` has put into a pipe; AF_VSOCK reaches the hypervisor from any network namespace; a new user namespace
grants capabilities, and with them most of the kernel's attack surface; keyrings are shared. The list follows Docker's
default profile. A shared mapping of a file in /dev/shm, which the limit on the workspace counts, is permitted.
Numbers: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import errno
import platform
import struct
from functools import lru_cache

from mtrl.errors import UserError

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SYSTEM_CALLS = {
    # name: (x86_64, aarch64)
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "quotactl": (179, 60),
}
_CLONE, _SOCKET, _SOCKETPAIR, _CLONE3 = (56, 220), (41, 198), (53, 199), 435
_MMAP = (9, 222)
_SHARED, _ANONYMOUS = 0x01, 0x20
"""Flags of `mmap`: MAP_SHARED, which is also a bit of MAP_SHARED_VALIDATE, and MAP_ANONYMOUS."""
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_AF_UNIX = 1

# Instructions of classic BPF, and offsets of the loaded fields in `struct seccomp_data`.
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 40
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


@lru_cache(maxsize=1)
def denied_system_calls() -> bytes:
    """Return the filter for this machine, an array of `struct sock_filter`.

    Raises:
        UserError: the machine is neither x86_64 nor aarch64.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise UserError(f"the process sandbox knows no system calls of {machine}; use x86_64 or aarch64")
    column = list(_ARCHITECTURES).index(machine)
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":  # the x32 calls, which have separate numbers
        program += [(_JUMP_ABOVE, 0, 1, 0x40000000), _refuse(errno.ENOSYS)]
    for numbers in _SYSTEM_CALLS.values():
        program += [(_JUMP_EQUAL, 0, 1, numbers[column]), _refuse(errno.EPERM)]
    # The flags of clone3 are behind a pointer, which a filter cannot read; libraries fall back to clone.
    program += [(_JUMP_EQUAL, 0, 1, _CLONE3), _refuse(errno.ENOSYS)]
    program += [
        (_JUMP_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_SET, 0, 1, _NEW_NAMESPACES),
        _refuse(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program += [
        (_JUMP_EQUAL, 0, 5, _MMAP[column]),
        (_LOAD, 0, 0, _FOURTH_ARGUMENT),
        (_JUMP_SET, 0, 2, _SHARED),
        (_JUMP_SET, 0, 1, _ANONYMOUS),
        _refuse(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for numbers in (_SOCKET, _SOCKETPAIR):
        program += [
            (_JUMP_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_JUMP_EQUAL, 1, 0, _AF_UNIX),
            _refuse(errno.EAFNOSUPPORT),
            (_RETURN, 0, 0, _ALLOW),
        ]
    program += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _refuse(error: int) -> tuple[int, int, int, int]:
    """Return the instruction by which a call fails with -1 and this errno."""
    return (_RETURN, 0, 0, 0x00050000 | error)
