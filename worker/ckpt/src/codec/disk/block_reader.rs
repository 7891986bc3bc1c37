//! Reads files sequentially, in whole blocks of 1 MiB. A thread reads ahead while the caller
//! verifies and uses the previous blocks.
use super::buffer_pool::{AlignedBuffer, DiskBufferPool};
use super::directory::Directory;
use super::io_units::{BLOCK_BYTES, DIRECT_IO_ALIGNMENT, WINDOW_BYTES, disable_direct_io};
use super::sparse::find_data;
use crate::error::{CkptError, DamageReason, Result};
use nix::fcntl::OFlag;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;

/// Number of 1 MiB blocks that are read with one request to the disk.
const WINDOW_BLOCKS: u64 = (WINDOW_BYTES / BLOCK_BYTES) as u64;

/// An open file that is read in whole blocks of 1 MiB.
pub(crate) struct BlockReader {
    file: File,
    directory: PathBuf,
    name: String,
    /// True while the file is read with O_DIRECT.
    direct: bool,
    size: u64,
    /// Offset in the open file at which the content to be read begins. Zero except in a memory file
    /// that contains several shards.
    base: u64,
}

impl BlockReader {
    /// Opens the file `name` in `directory` for reading, with O_DIRECT if the file system supports
    /// it.
    pub(crate) fn open(directory: &Directory, name: &str) -> Result<BlockReader> {
        let (file, size, direct) = match directory.open_file(name, OFlag::O_DIRECT) {
            Ok((file, size)) => (file, size, true),
            Err(CkptError::Io { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                let (file, size) = directory.open_file(name, OFlag::empty())?;
                (file, size, false)
            }
            Err(e) => return Err(e),
        };
        let (directory, name) = (directory.path().to_owned(), name.to_owned());
        Ok(BlockReader { file, directory, name, direct, size, base: 0 })
    }

    /// Creates a reader of the byte range `range` of a memory file, which error messages call the
    /// file `name` in the directory `directory`.
    pub(crate) fn from_memory_file(
        file: File,
        range: Range<u64>,
        directory: &Path,
        name: &str,
    ) -> BlockReader {
        let (directory, name) = (directory.to_owned(), name.to_owned());
        let size = range.end - range.start;
        BlockReader { file, directory, name, direct: false, size, base: range.start }
    }

    /// Returns the size in bytes that the file had when it was opened.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Lists those ranges of 1 MiB blocks within `blocks` that must be read because a part of them
    /// is stored outside of the holes of a sparse file. The other blocks are in holes of a sparse
    /// file and consist of zeros.
    pub(crate) fn list_data_blocks(&self, blocks: Range<u64>) -> Vec<Range<u64>> {
        let block = BLOCK_BYTES as u64;
        let (mut at, end) = (blocks.start * block, self.size.min(blocks.end.saturating_mul(block)));
        let mut found: Vec<Range<u64>> = Vec::new();
        while at < end {
            let data = find_data(&self.file, self.base + at..self.base + end);
            if data.is_empty() {
                break;
            }
            let range = (data.start - self.base) / block..(data.end - self.base).div_ceil(block);
            at = range.end * block;
            match found.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => found.push(range),
            }
        }
        found
    }

    /// Reads the byte range `bytes` of this open file into the beginning of the read buffer
    /// `window`, and reports a file that is too short as damaged. The range must begin at a block
    /// boundary.
    ///
    /// # Errors
    /// Fails with [`DamageReason::Truncated`] if the file ends within the range.
    fn read_blocks(&mut self, bytes: Range<u64>, window: &mut [u8]) -> Result<()> {
        match self.fill_window(bytes, window) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                Err(CkptError::damaged(&self.directory, &self.name, DamageReason::Truncated))
            }
            other => other.map_err(CkptError::io("read", &self.directory.join(&self.name))),
        }
    }

    /// Reads the byte range `bytes` of the file into the beginning of the buffer `window`, and
    /// turns O_DIRECT off if the file system rejects a direct read.
    fn fill_window(&mut self, bytes: Range<u64>, window: &mut [u8]) -> io::Result<()> {
        let len = (bytes.end - bytes.start) as usize;
        let mut done = 0;
        while done < len {
            let end = if self.direct { len.next_multiple_of(DIRECT_IO_ALIGNMENT) } else { len };
            match self.file.read_at(&mut window[done..end], self.base + bytes.start + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if self.direct && e.raw_os_error() == Some(libc::EINVAL) => {
                    disable_direct_io(&self.file)?;
                    self.direct = false;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// A request to read consecutive blocks of one file.
#[derive(Clone, Debug)]
pub(crate) struct BlockRequest {
    /// Index of the file, which [`stream_windows`] passes to its argument `open`.
    pub(crate) file: usize,
    /// Expected size of the file in bytes. The last block may be shorter than the others.
    pub(crate) size: u64,
    /// Range of the indices of the requested blocks in the file.
    pub(crate) blocks: Range<u64>,
}

impl BlockRequest {
    /// Splits the request into requests of at most [`WINDOW_BLOCKS`] blocks each, which fit into
    /// one read buffer.
    fn split_into_windows(&self) -> impl Iterator<Item = BlockRequest> + '_ {
        self.blocks
            .clone()
            .step_by(WINDOW_BLOCKS as usize)
            .map(|b| BlockRequest { blocks: b..(b + WINDOW_BLOCKS).min(self.blocks.end), ..*self })
    }

    /// Returns the range of file offsets, in bytes, that the requested blocks occupy. If the last
    /// block would reach beyond the expected size of the file, the range ends at that size.
    fn byte_range(&self) -> Range<u64> {
        let block = BLOCK_BYTES as u64;
        self.blocks.start * block..(self.blocks.end * block).min(self.size)
    }
}

/// The argument of the callback of [`stream_windows`]: a request for consecutive blocks of a file,
/// and either the bytes of these blocks or the read error.
pub(crate) type WindowResult<'a> = (BlockRequest, std::result::Result<&'a [u8], &'a CkptError>);

/// Reads the blocks that the requests in `jobs` name, one read buffer at a time, and calls `sink`
/// in order with the contents of each buffer. `open(i)` must open the file with index `i`, and is
/// called only if the previous request was for another file. A thread reads the next window while
/// `sink` runs.
///
/// # Errors
/// Fails at the first error that `sink` returns, or if memory for a window cannot be allocated.
/// Read errors are passed to `sink`, which decides whether to stop.
pub(crate) fn stream_windows(
    buffers: &DiskBufferPool,
    jobs: &[BlockRequest],
    open: impl Fn(usize) -> Result<BlockReader> + Send,
    mut sink: impl FnMut(WindowResult<'_>) -> Result<()>,
) -> Result<()> {
    let mut reader = BlockRequestReader { open, current: None };
    let memory =
        |e| CkptError::Io { action: "allocate memory to read", path: "a checkpoint".into(), source: e };
    let mut windows = jobs.iter().flat_map(BlockRequest::split_into_windows).peekable();
    let mut read_next = move |job: &BlockRequest| -> io::Result<(AlignedBuffer, Result<()>)> {
        let mut buffer = buffers.take()?;
        let read = reader.read_requested_blocks(job, &mut buffer);
        Ok((buffer, read))
    };
    let mut deliver = |job: BlockRequest, window: io::Result<(AlignedBuffer, Result<()>)>| {
        let (buffer, read) = window.map_err(memory)?;
        let len = (job.byte_range().end - job.byte_range().start) as usize;
        let result = sink((job, read.as_ref().map(|()| &buffer[..len])));
        buffers.give_back(buffer);
        result
    };
    let Some(first) = windows.next() else { return Ok(()) };
    if windows.peek().is_none() {
        let window = read_next(&first);
        return deliver(first, window);
    }
    std::thread::scope(|scope| {
        let (full, inbox) = sync_channel(1);
        let ahead = std::iter::once(first).chain(windows);
        scope.spawn(move || {
            for job in ahead {
                let window = read_next(&job);
                if full.send((job, window)).is_err() {
                    return;
                }
            }
        });
        inbox.into_iter().try_for_each(|(job, window)| deliver(job, window))
    })
}

/// A reader of checkpoint blocks that keeps the most recently read file open for the next request.
struct BlockRequestReader<F> {
    open: F,
    current: Option<(usize, BlockReader)>,
}

impl<F: Fn(usize) -> Result<BlockReader>> BlockRequestReader<F> {
    /// Reads the consecutive blocks of a checkpoint file that the request `job` names into the
    /// beginning of the read buffer `window`. Opens the file first if the previous request was for
    /// another file.
    fn read_requested_blocks(&mut self, job: &BlockRequest, window: &mut [u8]) -> Result<()> {
        if self.current.as_ref().is_none_or(|(i, _)| *i != job.file) {
            self.current = Some((job.file, (self.open)(job.file)?));
        }
        match &mut self.current {
            Some((_, file)) => file.read_blocks(job.byte_range(), window),
            None => Ok(()),
        }
    }
}
