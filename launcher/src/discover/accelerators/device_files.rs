//! Defines [`DeviceFiles`], which reads files of device drivers and limits their size, because a
//! container can replace them by other files.
use std::{
    fs::{self, File, OpenOptions},
    io::Read,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    str::FromStr,
};

/// The largest number of entries of a directory of device files that one listing returns. Further
/// entries are ignored.
const MAX_ENTRIES: usize = 4096;
/// The largest number of entries of a device directory that are read in one listing, including
/// those that the listing does not return. Further entries are ignored.
const MAX_READ_ENTRIES: usize = 1 << 20;
/// The largest number of bytes of a driver's file that are read. Further bytes are ignored.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Reads files of device drivers in /proc, /sys and /dev below a root directory, with limits on
/// their sizes.
pub(super) struct DeviceFiles<'a> {
    root: &'a Path,
    /// Returns whether this process may open a device node.
    is_permitted: &'a dyn Fn(&Path) -> bool,
}

impl<'a> DeviceFiles<'a> {
    pub(super) fn new(root: &'a Path, is_permitted: &'a dyn Fn(&Path) -> bool) -> DeviceFiles<'a> {
        DeviceFiles { root, is_permitted }
    }

    /// Returns the sorted names of the entries of a directory below the root directory. Returns no
    /// names if the directory cannot be read.
    pub(super) fn list_names(&self, directory: impl AsRef<Path>) -> Vec<String> {
        self.select_entries(directory, Some)
    }

    /// Returns the sorted results of calling `select` with the name of each directory entry,
    /// without the entries for which `select` returns `None`. Entries that are not selected do not
    /// count for the limit of [`MAX_ENTRIES`]: /dev may hold thousands of other nodes.
    pub(super) fn select_entries<T: Ord>(
        &self,
        directory: impl AsRef<Path>,
        select: impl Fn(String) -> Option<T>,
    ) -> Vec<T> {
        let Ok(entries) = fs::read_dir(self.root.join(directory)) else { return Vec::new() };
        let entries = entries.take(MAX_READ_ENTRIES).flatten();
        let names = entries.filter_map(|e| e.file_name().into_string().ok());
        let mut selected: Vec<T> = names.filter_map(select).take(MAX_ENTRIES).collect();
        selected.sort_unstable();
        selected
    }

    /// Returns, in ascending order, the numbers N for which a directory has an entry with the name
    /// `{prefix}N`.
    pub(super) fn list_numbers(&self, directory: impl AsRef<Path>, prefix: &str) -> Vec<u32> {
        let number = |name: String| {
            let digits = name.strip_prefix(prefix)?;
            let is_plain = digits.bytes().all(|b| b.is_ascii_digit());
            digits.parse::<u32>().ok().filter(|_| is_plain)
        };
        let mut numbers = self.select_entries(directory, number);
        numbers.dedup();
        numbers
    }

    /// Reads the beginning of a regular file below the root directory as text. Returns `None` if
    /// the file cannot be read or is not UTF-8.
    pub(super) fn read_text(&self, path: impl AsRef<Path>) -> Option<String> {
        // Opening a named pipe would block.
        let mut options = OpenOptions::new();
        let file: File = options.read(true).custom_flags(libc::O_NONBLOCK).open(self.root.join(path)).ok()?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).ok()?;
        String::from_utf8(bytes).ok()
    }

    /// Reads a file of a driver in /proc or /sys that contains a single value, such as a number.
    /// Returns `None` if the value cannot be read.
    pub(super) fn read_value<T: FromStr>(&self, path: impl AsRef<Path>) -> Option<T> {
        self.read_text(path)?.trim().parse().ok()
    }

    /// Reads a file of a driver that contains a hexadecimal number such as `0x8086`.
    pub(super) fn read_hex(&self, path: impl AsRef<Path>) -> Option<u32> {
        u32::from_str_radix(self.read_text(path)?.trim().strip_prefix("0x")?, 16).ok()
    }

    /// Returns the last component of a symbolic link's target path, such as the address or the
    /// driver's name of a device. Drivers link a device to the directory that is named after its
    /// address.
    pub(super) fn read_link_name(&self, path: impl AsRef<Path>) -> Option<String> {
        let target = fs::read_link(self.root.join(path)).ok()?;
        target.file_name()?.to_str().map(str::to_owned)
    }

    /// Reads the NUMA node to which the PCI device with the address `bus` belongs. Returns `None`
    /// if the kernel states -1 or the file cannot be read.
    pub(super) fn read_numa_node(&self, bus: &str) -> Option<u32> {
        // A damaged list of devices must not lead out of the directory.
        let is_address = bus.bytes().all(|b| b.is_ascii_hexdigit() || matches!(b, b':' | b'.'));
        let directory = PathBuf::from("sys/bus/pci/devices").join(bus.to_lowercase());
        is_address.then(|| self.read_value(directory.join("numa_node"))).flatten()
    }

    /// Returns whether this process may open the device node `path`, such as `dev/nvidia0`.
    pub(super) fn is_permitted(&self, path: impl AsRef<Path>) -> bool {
        (self.is_permitted)(&self.root.join(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_found_among_thousands_of_other_nodes() {
        let root = tempfile::tempdir().expect("a directory");
        let dev = root.path().join("dev");
        fs::create_dir(&dev).expect("a directory");
        for number in 0..MAX_ENTRIES + 1000 {
            File::create(dev.join(format!("tty{number}"))).expect("a file");
        }
        for number in [11, 3] {
            File::create(dev.join(format!("nvidia{number}"))).expect("a file");
        }
        let tree = DeviceFiles::new(root.path(), &|_| true);
        assert_eq!(tree.list_numbers("dev", "nvidia"), [3, 11]);
        assert_eq!(tree.list_names("dev").len(), MAX_ENTRIES);
    }
}
