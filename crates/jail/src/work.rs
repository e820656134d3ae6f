//! How a stage gets its work: a description and, where it was bound in advance, the agent's own socket; then, when it is
//! made, the cgroup, by the names of its files or with the files themselves. The description is one line, so that a stage can
//! begin with it while the cgroup is made.

use std::{
    io::{self, IoSlice, IoSliceMut, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
};

use rustix::{
    io::retry_on_intr,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};

/// Descriptors that go with one message at most: the agent's socket, or what a box holds of its cgroups.
const MOST_FILES: usize = 24;

/// Tells a stage its work, on the socket that is its standard input; `listener` if the agent's socket is bound already.
pub fn send(line: &UnixStream, text: &[u8], listener: Option<&UnixListener>) -> io::Result<()> {
    let files: Vec<BorrowedFd<'_>> = listener.into_iter().map(AsFd::as_fd).collect();
    send_along(line.as_fd(), text, &files)?;
    let mut line = line;
    line.write_all(b"\n")
}

/// The rest of the work, which ends with the line.
pub fn send_rest(line: UnixStream, text: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_along(line.as_fd(), text, files)
}

/// Sends all of it on a socket, and the descriptors with it.
pub fn send_along(line: BorrowedFd<'_>, text: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut along = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !along.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // Descriptors go with the first byte, whatever fits of the rest.
    let first = || sendmsg(line, &[IoSlice::new(text)], &mut along, SendFlags::NOSIGNAL);
    let mut sent = retry_on_intr(first)?;
    while sent < text.len() {
        sent += retry_on_intr(|| rustix::net::send(line, &text[sent..], SendFlags::NOSIGNAL))?;
    }
    Ok(())
}

/// A description is about this long: fresh memory is dear.
const USUAL: usize = 8 << 10;

/// What [`send`] has sent.
pub(crate) struct Received {
    pub(crate) text: Vec<u8>,
    /// In their order: those of the description, and those of the rest that came with it.
    files: Vec<OwnedFd>,
    /// Of the rest, what came with it.
    begun: Vec<u8>,
}

impl Received {
    /// The agent's own socket, if the description says that it comes along.
    pub(crate) fn listener(&mut self, bound: bool) -> io::Result<Option<OwnedFd>> {
        match bound {
            false => Ok(None),
            true if self.files.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
            true => Ok(Some(self.files.remove(0))),
        }
    }

    /// What [`send_rest`] sends, once it does.
    pub(crate) fn rest(&mut self, line: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let (mut rest, mut files) = (std::mem::take(&mut self.begun), std::mem::take(&mut self.files));
        let mut more = vec![0; USUAL];
        loop {
            match receive_along(line, &mut more, &mut files)? {
                0 => return Ok((rest, files)),
                count => rest.extend_from_slice(&more[..count]),
            }
        }
    }
}

/// Reads once, and adds the descriptors that come with it. 0 is the end.
pub fn receive_along(line: BorrowedFd<'_>, into: &mut [u8], files: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut along = RecvAncillaryBuffer::new(&mut space);
    let count = loop {
        match recvmsg(line, &mut [IoSliceMut::new(into)], &mut along, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            message => break message?.bytes,
        }
    };
    for message in along.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            files.extend(descriptors);
        }
    }
    Ok(count)
}

/// The other side of [`send`].
pub(crate) fn receive(line: BorrowedFd<'_>) -> io::Result<Received> {
    let (mut text, mut files) = (Vec::new(), Vec::new());
    let mut more = vec![0; USUAL];
    loop {
        match receive_along(line, &mut more, &mut files)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => text.extend_from_slice(&more[..count]),
        }
        if let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let begun = text.split_off(end + 1);
            text.truncate(end);
            return Ok(Received { text, files, begun });
        }
    }
}
