//! Computes hashes of launch's running executable. The hash names the copy of the executable in a
//! cache directory of each host, so that launch is copied to a host only once.
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io::{self, Read, Write},
};

/// The number of bytes of the executable that are read and hashed at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Computes the BLAKE3 hash of launch's running executable, in hexadecimal.
pub(crate) fn hash_executable() -> io::Result<String> {
    hash_file_blake3(&mut File::open("/proc/self/exe")?)
}

/// Prints the BLAKE3 hash of the running executable after flushing it to disk, so that launch can
/// verify the copy that it has made on a remote host. Returns the exit code.
pub(crate) fn sync_and_print_executable_hash() -> u8 {
    let hash = File::open("/proc/self/exe").and_then(|mut file| {
        file.sync_all()?;
        hash_file_blake3(&mut file)
    });
    match hash.and_then(|hash| writeln!(io::stdout(), "{hash}")) {
        Ok(()) => protocol::exit::DONE,
        Err(error) => {
            _ = writeln!(io::stderr(), "launch agent: cannot read the executable back: {error}");
            protocol::exit::FAILED
        }
    }
}

/// Computes the SHA-256 hash of launch's running executable, in hexadecimal.
pub(crate) fn compute_executable_sha256() -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut file = File::open("/proc/self/exe")?;
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            n => hasher.update(&chunk[..n]),
        }
    }
}

/// Computes the BLAKE3 hash of a file from the current read position to the end, in hexadecimal.
fn hash_file_blake3(file: &mut File) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            n => _ = hasher.update(&chunk[..n]),
        }
    }
}
