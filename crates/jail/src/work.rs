//! How a stage gets its work: a description and, where it was bound in advance, the agent's own socket; then, when it is
//! made, the cgroup. The description is one line, so that a stage can begin with it while the cgroup is made.

use std::{
    fs::File,
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Tells a stage its work, on the socket that is its standard input; `listener` if the agent's socket is bound already.
pub fn send(line: &UnixStream, text: &[u8], listener: Option<&UnixListener>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut along = SendAncillaryBuffer::new(&mut space);
    let listener = listener.map(|listener| [listener.as_fd()]);
    if let Some(listener) = &listener {
        along.push(SendAncillaryMessage::ScmRights(listener));
    }
    // The descriptor goes with the first byte, whatever fits of the rest.
    let sent = sendmsg(line, &[IoSlice::new(text)], &mut along, SendFlags::NOSIGNAL)?;
    let mut line = line;
    line.write_all(&text[sent..])?;
    line.write_all(b"\n")
}

/// The rest of the work, which ends with the line.
pub fn send_rest(mut line: UnixStream, text: &[u8]) -> io::Result<()> {
    line.write_all(text)
}

/// A description is about this long: fresh memory is dear.
const USUAL: usize = 8 << 10;

/// What [`send`] has sent.
pub(crate) struct Received {
    pub(crate) text: Vec<u8>,
    pub(crate) listener: Option<OwnedFd>,
    /// Of the rest, what came with it.
    begun: Vec<u8>,
}

impl Received {
    /// What [`send_rest`] sends, once it does.
    pub(crate) fn rest(&mut self, line: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
        let mut rest = std::mem::take(&mut self.begun);
        File::from(line.try_clone_to_owned()?).read_to_end(&mut rest)?;
        Ok(rest)
    }
}

/// The other side of [`send`].
pub(crate) fn receive(line: BorrowedFd<'_>) -> io::Result<Received> {
    let mut text = vec![0; USUAL];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut along = RecvAncillaryBuffer::new(&mut space);
    let count = recvmsg(line, &mut [IoSliceMut::new(&mut text)], &mut along, RecvFlags::CMSG_CLOEXEC)?.bytes;
    text.truncate(count);
    let mut listener = None;
    for message in along.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            listener = descriptors.last();
        }
    }
    let mut more = [0; 4096];
    loop {
        if let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let begun = text.split_off(end + 1);
            text.truncate(end);
            return Ok(Received { text, listener, begun });
        }
        match rustix::io::read(line, &mut more) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => text.extend_from_slice(&more[..count]),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
