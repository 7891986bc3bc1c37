//! [`write_atomically`]: replaces a file of a run directory in one step.
use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

/// Replaces the content of the file `name` in `directory` by `bytes`, atomically and durably. After
/// a crash, the file has either all of `bytes` or its previous content.
pub(crate) fn write_atomically(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = directory.join(format!(".{name}.tmp"));
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, directory.join(name))?;
    File::open(directory)?.sync_all()
}
