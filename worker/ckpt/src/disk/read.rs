//! Blocks of files, read ahead by a thread while the caller checks and uses the ones before.
use super::{ALIGN, BLOCK, Buffer, Buffers, Folder, WINDOW};
use crate::error::{CkptError, Result};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::sync_channel;

/// Blocks per window.
const WINDOW_BLOCKS: u64 = (WINDOW / BLOCK) as u64;

/// An open file of known size.
pub(crate) struct BlockFile {
    file: File,
    folder: PathBuf,
    name: String,
    direct: bool,
    size: u64,
}

impl BlockFile {
    /// Opens it past the page cache where the file system allows it.
    pub(crate) fn open(folder: &Folder, name: &str) -> Result<BlockFile> {
        let (file, size, direct) = match folder.open_file(name, OFlag::O_DIRECT) {
            Ok((file, size)) => (file, size, true),
            Err(CkptError::Io { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                let (file, size) = folder.open_file(name, OFlag::empty())?;
                (file, size, false)
            }
            Err(e) => return Err(e),
        };
        Ok(BlockFile { file, folder: folder.path().to_owned(), name: name.to_owned(), direct, size })
    }

    /// Size now.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Reads `bytes` (starting at a block) into the start of `window`; a file that ends early is damage.
    fn read(&mut self, bytes: Range<u64>, window: &mut [u8]) -> Result<()> {
        match self.fill(bytes, window) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                Err(CkptError::damaged(&self.folder, &self.name, "it is cut short"))
            }
            other => other.map_err(CkptError::io("read", &self.folder.join(&self.name))),
        }
    }

    fn fill(&mut self, bytes: Range<u64>, window: &mut [u8]) -> io::Result<()> {
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

/// Blocks to read of one file.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Index of the file; the caller's.
    pub(crate) file: usize,
    /// Whole file's size as the caller expects it: the last block may be shorter.
    pub(crate) size: u64,
    /// Indices of the blocks.
    pub(crate) blocks: Range<u64>,
}

impl Job {
    /// Jobs of at most one window each.
    fn windows(&self) -> impl Iterator<Item = Job> + '_ {
        self.blocks
            .clone()
            .step_by(WINDOW_BLOCKS as usize)
            .map(|b| Job { blocks: b..(b + WINDOW_BLOCKS).min(self.blocks.end), ..*self })
    }

    fn bytes(&self) -> Range<u64> {
        let block = BLOCK as u64;
        self.blocks.start * block..(self.blocks.end * block).min(self.size)
    }
}

/// What came of one window: its blocks' bytes one after the other, or why they could not be read.
pub(crate) type Window<'a> = (Job, std::result::Result<&'a [u8], &'a CkptError>);

/// Reads all jobs in order, handing each window to `sink`; stops at the first error of `sink`. `open` is called once per
/// run of jobs of the same file.
pub(crate) fn stream(
    buffers: &Buffers,
    jobs: &[Job],
    open: impl Fn(usize) -> Result<BlockFile> + Send,
    mut sink: impl FnMut(Window<'_>) -> Result<()>,
) -> Result<()> {
    let mut reader = Reader { open, current: None };
    let memory = |e| CkptError::Io { action: "get memory to read", path: "a checkpoint".into(), source: e };
    let mut windows = jobs.iter().flat_map(Job::windows).peekable();
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
        let (full, inbox) = sync_channel::<(Job, io::Result<Buffer>, Result<()>)>(1);
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

/// Keeps the file of the last job open.
struct Reader<F> {
    open: F,
    current: Option<(usize, BlockFile)>,
}

impl<F: Fn(usize) -> Result<BlockFile>> Reader<F> {
    fn read(&mut self, job: &Job, window: &mut [u8]) -> Result<()> {
        if self.current.as_ref().is_none_or(|(i, _)| *i != job.file) {
            self.current = Some((job.file, (self.open)(job.file)?));
        }
        match &mut self.current {
            Some((_, file)) => file.read(job.bytes(), window),
            None => Ok(()),
        }
    }
}
