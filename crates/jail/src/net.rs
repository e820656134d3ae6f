//! The network of a box: a namespace with a loopback interface and nothing else.

use std::{io, os::fd::AsFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::sys;

/// Brings `lo` up in the namespace of this process.
pub fn loopback_up() -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sys::loopback_up(socket.as_fd())
}
