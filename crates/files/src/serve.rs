//! One entry point for requests off the wire; engine and agent both use it.

use carrel_proto::files::{FileReply, FileRequest};

use crate::{FileError, Root, WriteOptions};

/// Does what `request` asks for. Blocks.
pub fn serve(root: &Root, request: FileRequest) -> Result<FileReply, FileError> {
    Ok(match request {
        FileRequest::Read(ask) => FileReply::Read(root.read(&ask.path, ask.offset, ask.len)?),
        FileRequest::Write(ask) => {
            let options = WriteOptions {
                append: ask.append,
                create_new: !ask.overwrite,
                mode: ask.mode,
                parents: ask.parents,
                sync: ask.sync,
            };
            FileReply::Write(root.write(&ask.path, ask.data.as_bytes(), options)?)
        }
        FileRequest::List(ask) => {
            FileReply::List(root.list(&ask.path, ask.depth, ask.limit, ask.after.as_ref())?)
        }
        FileRequest::Stat(ask) => FileReply::Stat(root.stat(&ask.path, ask.follow)?),
        FileRequest::Move(ask) => {
            FileReply::Move(root.rename(&ask.from, &ask.to, ask.overwrite, ask.parents)?)
        }
        FileRequest::Delete(ask) => FileReply::Delete(root.delete(&ask.path, ask.recursive)?),
        FileRequest::Mkdir(ask) => FileReply::Mkdir(root.mkdir(&ask.path, ask.parents, ask.mode)?),
        FileRequest::Search(ask) => FileReply::Search(root.search(&ask)?),
        FileRequest::Replace(ask) => FileReply::Replace(root.replace(&ask)?),
    })
}
