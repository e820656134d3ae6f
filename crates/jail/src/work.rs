//! How a stage gets its work: a description and, where it was bound in advance, the agent's own socket.

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
    line.write_all(&text[sent..])
}

/// The other side of [`send`].
pub(crate) fn receive(line: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut text = vec![0; 64 << 10];
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
    File::from(line.try_clone_to_owned()?).read_to_end(&mut text)?;
    Ok((text, listener))
}
