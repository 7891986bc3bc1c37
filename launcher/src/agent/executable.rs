//! The executable that runs: its content hash, by which hosts know it.
use std::{
    fs::File,
    io::{self, Read, Write},
};

/// Piece that is hashed at once, bytes.
const PIECE: usize = 1 << 20;

/// BLAKE3 of this very executable, hexadecimal.
pub(crate) fn own_hash() -> io::Result<String> {
    hash(&mut File::open("/proc/self/exe")?)
}

/// Makes sure that the executable is on disk, and prints its hash; the exit code.
pub(crate) fn print_own_hash() -> u8 {
    let hashed = File::open("/proc/self/exe").and_then(|mut file| {
        file.sync_all()?;
        hash(&mut file)
    });
    match hashed.and_then(|hash| writeln!(io::stdout(), "{hash}")) {
        Ok(()) => contract::exit::DONE,
        Err(error) => {
            _ = writeln!(io::stderr(), "launch agent: the executable can't be read back: {error}");
            contract::exit::FAILED
        }
    }
}

fn hash(file: &mut File) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; PIECE];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            n => _ = hasher.update(&piece[..n]),
        }
    }
}
