//! Reads blocks of files. A thread reads ahead while the caller verifies and uses the previous
//! blocks.
use super::{ALIGN, BLOCK, Buffer, Buffers, Directory, WINDOW};
use crate::error::{CkptError, DamageReason, Result};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::sync_channel;

/// Blocks per window.
const WINDOW_BLOCKS: u64 = (WINDOW / BLOCK) as u64;

/// An open file that is read in blocks.
pub(crate) struct BlockFile {
    file: File,
    directory: PathBuf,
    name: String,
    direct: bool,
    size: u64,
}

impl BlockFile {
    /// Opens the file with O_DIRECT if the file system supports it.
    pub(crate) fn open(directory: &Directory, name: &str) -> Result<BlockFile> {
        let (file, size, direct) = match directory.open_file(name, OFlag::O_DIRECT) {
            Ok((file, size)) => (file, size, true),
            Err(CkptError::Io { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                let (file, size) = directory.open_file(name, OFlag::empty())?;
                (file, size, false)
            }
            Err(e) => return Err(e),
        };
        Ok(BlockFile { file, directory: directory.path().to_owned(), name: name.to_owned(), direct, size })
    }

    /// Size of the file when it was opened.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Reads `bytes`, which begin at a block, to the start of `window`. A file that ends early is
    /// damaged.
    fn read(&mut self, bytes: Range<u64>, window: &mut [u8]) -> Result<()> {
        match self.fill_window(bytes, window) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                Err(CkptError::damaged(&self.directory, &self.name, DamageReason::Truncated))
            }
            other => other.map_err(CkptError::io("read", &self.directory.join(&self.name))),
        }
    }

    fn fill_window(&mut self, bytes: Range<u64>, window: &mut [u8]) -> io::Result<()> {
        let len = (bytes.end - bytes.start) as usize;
        let mut done = 0;
        while done < len {
            let end = if self.direct { len.next_multiple_of(ALIGN) } else { len };
            match self.file.read_at(&mut window[done..end], bytes.start + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if self.direct && e.raw_os_error() == Some(libc::EINVAL) => {
                    let flags = OFlag::from_bits_retain(fcntl(&self.file, FcntlArg::F_GETFL)?);
                    fcntl(&self.file, FcntlArg::F_SETFL(flags - OFlag::O_DIRECT))?;
                    self.direct = false;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// A request to read blocks of one file.
#[derive(Clone, Debug)]
pub(crate) struct ReadJob {
    /// Index of the file, assigned by the caller.
    pub(crate) file: usize,
    /// Expected size of the file; the last block may be shorter.
    pub(crate) size: u64,
    /// Indices of the blocks.
    pub(crate) blocks: Range<u64>,
}

impl ReadJob {
    /// Splits the job into jobs of at most one window each.
    fn windows(&self) -> impl Iterator<Item = ReadJob> + '_ {
        self.blocks
            .clone()
            .step_by(WINDOW_BLOCKS as usize)
            .map(|b| ReadJob { blocks: b..(b + WINDOW_BLOCKS).min(self.blocks.end), ..*self })
    }

    fn bytes(&self) -> Range<u64> {
        let block = BLOCK as u64;
        self.blocks.start * block..(self.blocks.end * block).min(self.size)
    }
}

/// The result of reading one window: the bytes of its blocks, or the error.
pub(crate) type Window<'a> = (ReadJob, std::result::Result<&'a [u8], &'a CkptError>);

/// Reads all jobs in order and passes each window to `sink`; stops at the first error of `sink`.
/// `open` is called once for consecutive jobs of the same file.
pub(crate) fn stream(
    buffers: &Buffers,
    jobs: &[ReadJob],
    open: impl Fn(usize) -> Result<BlockFile> + Send,
    mut sink: impl FnMut(Window<'_>) -> Result<()>,
) -> Result<()> {
    let mut reader = Reader { open, current: None };
    let memory =
        |e| CkptError::Io { action: "allocate memory to read", path: "a checkpoint".into(), source: e };
    let mut windows = jobs.iter().flat_map(ReadJob::windows).peekable();
    let Some(first) = windows.next() else { return Ok(()) };
    if windows.peek().is_none() {
        let mut buffer = buffers.take().map_err(memory)?;
        let read = reader.read(&first, &mut buffer);
        let len = (first.bytes().end - first.bytes().start) as usize;
        let result = sink((first, read.as_ref().map(|()| &buffer[..len])));
        buffers.give(buffer);
        return result;
    }
    std::thread::scope(|scope| {
        let (full, inbox) = sync_channel::<(ReadJob, io::Result<Buffer>, Result<()>)>(1);
        let ahead = std::iter::once(first).chain(windows);
        scope.spawn(move || {
            for job in ahead {
                let (buffer, read) = match buffers.take() {
                    Ok(mut buffer) => {
                        let read = reader.read(&job, &mut buffer);
                        (Ok(buffer), read)
                    }
                    Err(e) => (Err(e), Ok(())),
                };
                if full.send((job, buffer, read)).is_err() {
                    return;
                }
            }
        });
        for (job, buffer, read) in inbox {
            let buffer = buffer.map_err(memory)?;
            let len = (job.bytes().end - job.bytes().start) as usize;
            let result = sink((job, read.as_ref().map(|()| &buffer[..len])));
            buffers.give(buffer);
            result?;
        }
        Ok(())
    })
}

/// Reads jobs, and keeps the file of the last job open.
struct Reader<F> {
    open: F,
    current: Option<(usize, BlockFile)>,
}

impl<F: Fn(usize) -> Result<BlockFile>> Reader<F> {
    fn read(&mut self, job: &ReadJob, window: &mut [u8]) -> Result<()> {
        if self.current.as_ref().is_none_or(|(i, _)| *i != job.file) {
            self.current = Some((job.file, (self.open)(job.file)?));
        }
        match &mut self.current {
            Some((_, file)) => file.read(job.bytes(), window),
            None => Ok(()),
        }
    }
}
