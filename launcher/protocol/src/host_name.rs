//! Reads the hostname by which a machine identifies itself in messages.
use std::{fs, io, path::Path};

/// Reads the hostname of this machine from `/proc`. Returns an empty text if `/proc` is not
/// readable.
pub fn read_host_name() -> String {
    read_host_name_below(Path::new("/")).unwrap_or_default()
}

/// Reads the hostname of a machine from the `proc` directory below the directory `root`, which is
/// `/` except in tests. The error contains the path of the file.
pub fn read_host_name_below(root: &Path) -> io::Result<String> {
    let path = "proc/sys/kernel/hostname";
    let name = fs::read_to_string(root.join(path));
    name.map(|name| name.trim().to_owned()).map_err(|e| io::Error::new(e.kind(), format!("/{path}: {e}")))
}
