//! [`EncryptedStream`]: a byte stream that is encrypted with the session keys from the
//! [handshake](super::handshake) between its two sides.
//!
//! The bytes travel in records: a little-endian u16 length, and a ciphertext of that length
//! (ChaCha20-Poly1305). The number of a record is its nonce and is not sent. So a record that was
//! changed, repeated, left out or moved cannot be decrypted, and ends the connection. A side needs
//! at most two buffers of 64 KiB for each direction, whatever the other side sends.
use snow::StatelessTransportState;
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

/// The size of the header of a record (an encrypted piece of the stream), in bytes.
const HEADER_BYTES: usize = 2;
/// The size of the authentication tag of a record (an encrypted piece of the stream), in bytes.
const TAG_BYTES: usize = 16;
/// The largest number of bytes of plaintext that one record (an encrypted piece of the stream)
/// carries.
pub(super) const MAX_PLAINTEXT_BYTES: usize = u16::MAX as usize - TAG_BYTES;
/// The largest capacity, in bytes, of an emptied buffer that is kept for the next record; a larger
/// one is freed.
const MAX_KEPT_BUFFER_BYTES: usize = 8 << 10;

/// A byte stream to another process that is encrypted with the session keys from a handshake.
/// [`Self::into_halves`] returns its two directions.
pub(crate) struct EncryptedStream<S> {
    stream: S,
    keys: Arc<StatelessTransportState>,
    /// The number of the next record to read. `next_write` is the number of the next record to
    /// write.
    next_read: u64,
    next_write: u64,
}

impl<S> EncryptedStream<S> {
    /// Creates an encrypted stream over the byte stream `stream`, with the session keys from a
    /// completed handshake. No record was sent yet.
    pub(super) fn new(stream: S, keys: StatelessTransportState) -> Self {
        EncryptedStream { stream, keys: Arc::new(keys), next_read: 0, next_write: 0 }
    }

    /// Returns the underlying stream, such as a TCP connection, over which the encrypted bytes
    /// travel.
    pub(crate) fn transport(&self) -> &S {
        &self.stream
    }

    /// Splits the encrypted stream into a half for reading and a half for writing. The function
    /// `split` splits the underlying stream that carries the records.
    pub(crate) fn into_halves<R, W>(
        self,
        split: impl FnOnce(S) -> (R, W),
    ) -> (EncryptedReader<R>, EncryptedWriter<W>) {
        let (reader, writer) = split(self.stream);
        (
            EncryptedReader {
                stream: reader,
                keys: self.keys.clone(),
                next: self.next_read,
                record: Vec::new(),
                filled: 0,
                text: Vec::new(),
                taken: 0,
            },
            EncryptedWriter {
                stream: writer,
                keys: self.keys,
                next: self.next_write,
                record: Vec::new(),
                written: 0,
            },
        )
    }
}

impl<S: AsyncWrite + Unpin> EncryptedStream<S> {
    /// Encrypts and sends a record with empty content, by which the other side recognizes that this
    /// side has the correct keys.
    pub(super) async fn write_empty_record(&mut self) -> io::Result<()> {
        let record = encrypt_record(&self.keys, self.next_write, &[])?;
        self.next_write += 1;
        self.stream.write_all(&record).await?;
        self.stream.flush().await
    }
}

impl<S: AsyncRead + Unpin> EncryptedStream<S> {
    /// Reads one record that must be empty, and checks that it was encrypted with the keys of this
    /// connection. Returns false if the other side does not have the keys.
    pub(super) async fn read_empty_record(&mut self) -> io::Result<bool> {
        let mut record = [0; HEADER_BYTES + TAG_BYTES];
        self.stream.read_exact(&mut record).await?;
        let (header, ciphertext) = record.split_at(HEADER_BYTES);
        let is_empty = header == (TAG_BYTES as u16).to_le_bytes();
        let is_authentic = self.keys.read_message(self.next_read, ciphertext, &mut [0; TAG_BYTES]).is_ok();
        self.next_read += 1;
        Ok(is_empty && is_authentic)
    }
}

/// Encrypts the plaintext `text` as one record (a piece of the encrypted stream) whose sequence
/// number `number` is the nonce. Fails if `text` is longer than [`MAX_PLAINTEXT_BYTES`].
fn encrypt_record(keys: &StatelessTransportState, number: u64, text: &[u8]) -> io::Result<Vec<u8>> {
    let mut record = vec![0; HEADER_BYTES + text.len() + TAG_BYTES];
    let (header, ciphertext) = record.split_at_mut(HEADER_BYTES);
    let length = keys.write_message(number, text, ciphertext).map_err(io::Error::other)?;
    header.copy_from_slice(&u16::try_from(length).map_err(io::Error::other)?.to_le_bytes());
    Ok(record)
}

/// The half of an [`EncryptedStream`] that reads from the other side.
pub(crate) struct EncryptedReader<R> {
    stream: R,
    keys: Arc<StatelessTransportState>,
    /// The number of the next record.
    next: u64,
    /// The record that is being read, with its header. The first `filled` bytes have arrived.
    record: Vec<u8>,
    filled: usize,
    /// The decrypted text of the most recently read record. The first `taken` bytes were returned
    /// to the caller.
    text: Vec<u8>,
    taken: usize,
}

impl<R> EncryptedReader<R> {
    /// Returns the underlying stream, such as a TCP connection, over which the encrypted bytes
    /// travel.
    pub(crate) fn transport_mut(&mut self) -> &mut R {
        &mut self.stream
    }
}

impl<R: AsyncRead + Unpin> EncryptedReader<R> {
    /// Polls the underlying stream for bytes until the buffer contains one complete encrypted
    /// record. Returns false if the stream ends between two records. Fails if the stream ends
    /// within a record.
    fn poll_record(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        loop {
            let length = match self.record.first_chunk::<HEADER_BYTES>() {
                Some(header) if self.filled >= HEADER_BYTES => {
                    HEADER_BYTES + usize::from(u16::from_le_bytes(*header))
                }
                _ => HEADER_BYTES,
            };
            if self.filled == length && length > HEADER_BYTES {
                return Poll::Ready(Ok(true));
            }
            if self.filled == HEADER_BYTES && length < HEADER_BYTES + TAG_BYTES {
                return Poll::Ready(Err(build_altered_record_error()));
            }
            self.record.resize(length, 0);
            let mut buffer = ReadBuf::new(&mut self.record[self.filled..]);
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer))?;
            match buffer.filled().len() {
                0 if self.filled == 0 => return Poll::Ready(Ok(false)),
                0 => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                n => self.filled += n,
            }
        }
    }

    /// Decrypts the record (an encrypted piece of the stream) that is complete in the reader's
    /// buffer, and keeps its plaintext for the next reads. If the record was altered, it stays in
    /// the buffer, so that every later call fails, too.
    fn decrypt_record(&mut self) -> io::Result<()> {
        let ciphertext = &self.record[HEADER_BYTES..self.filled];
        self.text.resize(ciphertext.len(), 0);
        let length = self
            .keys
            .read_message(self.next, ciphertext, &mut self.text)
            .map_err(|_| build_altered_record_error());
        self.text.truncate(*length.as_ref().unwrap_or(&0));
        length?;
        (self.next, self.taken, self.filled) = (self.next + 1, 0, 0);
        clear_and_shrink_buffer(&mut self.record);
        Ok(())
    }
}

/// Builds the error for a record of the encrypted stream that cannot be decrypted because it was
/// altered.
fn build_altered_record_error() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the encrypted data were altered on the way")
}

/// Empties a buffer of encrypted or decrypted bytes, and shrinks its capacity to at most
/// [`MAX_KEPT_BUFFER_BYTES`].
fn clear_and_shrink_buffer(buffer: &mut Vec<u8>) {
    buffer.clear();
    buffer.shrink_to(MAX_KEPT_BUFFER_BYTES);
}

impl<R: AsyncRead + Unpin> AsyncRead for EncryptedReader<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        while self.taken == self.text.len() {
            if !ready!(self.poll_record(cx))? {
                return Poll::Ready(Ok(()));
            }
            self.decrypt_record()?;
        }
        let rest = &self.text[self.taken..];
        let count = rest.len().min(buffer.remaining());
        buffer.put_slice(&rest[..count]);
        self.taken += count;
        if self.taken == self.text.len() {
            self.taken = 0;
            clear_and_shrink_buffer(&mut self.text);
        }
        Poll::Ready(Ok(()))
    }
}

/// The half of an [`EncryptedStream`] that writes to the other side. Written bytes arrive after a
/// flush at the latest.
pub(crate) struct EncryptedWriter<W> {
    stream: W,
    keys: Arc<StatelessTransportState>,
    /// The number of the next record.
    next: u64,
    /// The most recently encrypted record. Its first `written` bytes were written to the underlying
    /// stream.
    record: Vec<u8>,
    written: usize,
}

impl<W: AsyncWrite + Unpin> EncryptedWriter<W> {
    /// Continues to write the current encrypted record to the underlying stream, and returns ready
    /// when the whole record is written.
    fn poll_write_record(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.record.len() {
            let rest = &self.record[self.written..];
            match ready!(Pin::new(&mut self.stream).poll_write(cx, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                n => self.written += n,
            }
        }
        self.written = 0;
        clear_and_shrink_buffer(&mut self.record);
        Poll::Ready(Ok(()))
    }
}

impl<W: AsyncWrite + Unpin> AsyncWrite for EncryptedWriter<W> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_write_record(cx))?;
        let text = &bytes[..bytes.len().min(MAX_PLAINTEXT_BYTES)];
        if text.is_empty() {
            return Poll::Ready(Ok(0));
        }
        self.record = encrypt_record(&self.keys, self.next, text)?;
        self.next += 1;
        // What the stream does not take now is written by the next write or flush.
        if let Poll::Ready(Err(error)) = self.poll_write_record(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(text.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_record(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_record(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
#[path = "encrypted_stream_tests.rs"]
mod tests;
