//! A call's output for people, as it comes.

use std::path::PathBuf;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use carrel_proto::{
    frame::Stream,
    limits::ByteSize,
    message::{Display, DisplayKind},
    problem::{Code, Problem},
};
use rustix::io::Errno;

use crate::{output::Output, output::write_all, progress::Progress, stream::Sink};

#[derive(Debug)]
pub(crate) struct Live<'a> {
    output: &'a Output,
    progress: Progress,
    /// stdout stands at the start of a line.
    fresh: bool,
    closed: bool,
    images: Images,
    /// The value of the last expression, shown after everything else.
    result: Option<Display>,
    /// Where stdout and stderr should go on: anything else is a hole.
    expected: [Option<u64>; 2],
}

/// Where images go.
#[derive(Debug)]
pub(crate) struct Images {
    pub(crate) directory: Option<PathBuf>,
    count: usize,
}

impl Images {
    pub(crate) fn to(directory: Option<PathBuf>) -> Self {
        Self { directory, count: 0 }
    }

    /// Writes an image under the next free number.
    pub(crate) fn save(&mut self, mime: &str, data: &str) -> Result<Option<PathBuf>, Problem> {
        let Some(directory) = &self.directory else { return Ok(None) };
        let failed = |error: std::io::Error| {
            Problem::new(Code::InvalidArgument, format!("{}: {error}", directory.display()))
        };
        std::fs::create_dir_all(directory).map_err(failed)?;
        let bytes = if mime == "image/svg+xml" {
            data.as_bytes().to_vec()
        } else {
            STANDARD.decode(data.trim()).map_err(|error| {
                Problem::new(Code::Protocol, format!("an image that is not base64: {error}"))
            })?
        };
        let ending = match mime {
            "image/jpeg" => "jpg",
            "image/svg+xml" => "svg",
            "image/gif" => "gif",
            "image/webp" => "webp",
            _ => "png",
        };
        loop {
            self.count += 1;
            let path = directory.join(format!("image-{}.{ending}", self.count));
            match std::fs::File::create_new(&path) {
                Ok(mut file) => {
                    std::io::Write::write_all(&mut file, &bytes).map_err(failed)?;
                    return Ok(Some(path));
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

impl<'a> Live<'a> {
    pub(crate) fn new(output: &'a Output, progress: Progress, images: Option<PathBuf>) -> Self {
        Self {
            output,
            progress,
            fresh: true,
            closed: false,
            images: Images::to(images),
            result: None,
            expected: [None; 2],
        }
    }

    fn show(&mut self, display: &Display) -> Result<(), Problem> {
        if self.closed {
            return Ok(());
        }
        self.progress.stop();
        let text = display.mime.get("text/plain").and_then(|text| text.as_str());
        if let Some(text) = text {
            let before = if self.fresh { "" } else { "\n" };
            self.stdout(format!("{before}{text}\n").as_bytes())?;
        }
        for (mime, data) in &display.mime {
            let Some(data) = data.as_str() else { continue };
            if mime.starts_with("image/") {
                match self.images.save(mime, data)? {
                    Some(path) => self.output.note(format_args!("{mime} saved as {}", path.display())),
                    None => self
                        .output
                        .note(format_args!("[{mime} {}] --save-images DIR keeps it", size(mime, data))),
                }
            } else if text.is_none() {
                self.output.note(format_args!("[{mime} {}] --json has it", size(mime, data)));
            }
        }
        Ok(())
    }

    fn stdout(&mut self, bytes: &[u8]) -> Result<(), Problem> {
        let Some(last) = bytes.last() else { return Ok(()) };
        self.fresh = *last == b'\n';
        match write_all(rustix::stdio::stdout(), bytes) {
            Ok(()) => Ok(()),
            Err(Errno::PIPE) => {
                self.closed = true;
                Ok(())
            }
            Err(error) => Err(Problem::internal(format!("writing to stdout: {error}"))),
        }
    }
}

impl Sink for Live<'_> {
    fn bytes(&mut self, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Problem> {
        if self.closed {
            return Ok(());
        }
        self.progress.stop();
        let expected =
            self.expected[usize::from(stream == Stream::Stderr)].replace(offset + bytes.len() as u64);
        if let Some(hole) =
            expected.and_then(|expected| offset.checked_sub(expected)).filter(|hole| *hole > 0)
        {
            self.output.note(format_args!("{hole} bytes here were beyond the output limit and not kept"));
        }
        match stream {
            Stream::Stderr => {
                // Whoever closed stderr does not want it.
                let _ = write_all(rustix::stdio::stderr(), bytes);
                Ok(())
            }
            _ => self.stdout(bytes),
        }
    }

    fn display(&mut self, display: Display) -> Result<(), Problem> {
        if display.kind == DisplayKind::Display {
            return self.show(&display);
        }
        // What the interpreter still holds in a buffer comes behind it.
        self.result = Some(display);
        Ok(())
    }

    fn ended(&mut self) -> Result<(), Problem> {
        self.progress.stop();
        self.result.take().map_or(Ok(()), |result| self.show(&result))
    }

    fn closed(&self) -> bool {
        self.closed
    }
}

fn size(mime: &str, data: &str) -> ByteSize {
    let text = data.len() as u64;
    let is_text = mime.starts_with("text/") || mime.ends_with("+xml") || mime.ends_with("json");
    ByteSize(if is_text { text } else { text / 4 * 3 })
}
