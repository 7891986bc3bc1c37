//! [`StateVector`]: a vector of optimizer states, which is stored in device memory, in host memory,
//! or in a mapped file.
//!
//! A mapped file is unlinked directly after its creation. So no file remains however a run ends,
//! and no other process can truncate the file. The disk space is reserved on creation, so a full
//! disk is found before the first step.
use device::{Buf, Dtype, Ops, View, ViewMut, storage::Event};
use jobspec::OffloadTarget;
use memmap2::{Advice, MmapMut, UncheckedAdvice};
use nix::fcntl::posix_fallocate;
use std::{
    fs::{self, File},
    io,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// A vector with the optimizer states of one kind, such as first moments, for one parameter unit
/// (tensors that are gathered together), in memory or in a file.
pub struct StateVector {
    storage: StateStorage,
    /// The event that completes with the most recent copy from or to offloaded states.
    last_copy: Event,
}

/// Where the elements of a vector of optimizer states are stored: in device or host memory, or in a
/// mapped file.
enum StateStorage {
    Memory(Buf),
    File { map: MmapMut, len: usize },
}

/// The number of files for offloaded optimizer states that this process has created, from which the
/// name of the next file is formed.
static FILE_COUNTER: AtomicU64 = AtomicU64::new(0);

impl StateVector {
    /// Allocates `len` zeroed optimizer states, in the memory of the compute device or, if
    /// `offload` requests it, in host memory or a file.
    pub fn zeroed(ops: &dyn Ops, len: usize, offload: Option<&OffloadTarget>) -> io::Result<Self> {
        let storage = match offload.filter(|_| len > 0) {
            None => StateStorage::Memory(ops.zeroed_with_purpose("the optimizer's states", Dtype::F32, len)),
            Some(OffloadTarget::Cpu) => StateStorage::Memory(ops.alloc_staging(Dtype::F32, len)),
            Some(OffloadTarget::Files(directory)) => {
                let file = create_unlinked_file(directory)?;
                let bytes = i64::try_from(len * size_of::<f32>()).map_err(io::Error::other)?;
                posix_fallocate(&file, 0, bytes)?;
                // SAFETY: the file is unlinked, so no other process changes or truncates it.
                let map = unsafe { MmapMut::map_mut(&file) }?;
                StateStorage::File { map, len }
            }
        };
        Ok(StateVector { storage, last_copy: Event::default() })
    }

    /// Returns the number of optimizer states in the vector.
    pub fn len(&self) -> usize {
        self.unsynchronized_view().len()
    }

    /// Returns whether the vector has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits for running copies of these optimizer states between offload storage and device, and
    /// returns the states for reading. The states are invalid if the status of the backend is a
    /// failure.
    pub fn view(&self) -> View<'_> {
        self.wait_for_copies();
        self.unsynchronized_view()
    }

    /// Waits for running copies of the optimizer states, and returns the states for writing.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        self.wait_for_copies();
        self.unsynchronized_view_mut()
    }

    /// Blocks until no copy of the optimizer states between their storage and the device is
    /// running. A failure of a copy is recorded in the status of the backend.
    fn wait_for_copies(&self) {
        let _ = self.last_copy.synchronize();
    }

    /// Returns the optimizer states for reading immediately, although a copy to or from them may
    /// still be running.
    fn unsynchronized_view(&self) -> View<'_> {
        match &self.storage {
            StateStorage::Memory(buf) => buf.view(),
            StateStorage::File { map, len } => bytemuck::cast_slice(map)[..*len].into(),
        }
    }

    /// Returns the optimizer states for writing without waiting, even if a copy is running.
    fn unsynchronized_view_mut(&mut self) -> ViewMut<'_> {
        match &mut self.storage {
            StateStorage::Memory(buf) => buf.view_mut(),
            StateStorage::File { map, len } => (&mut bytemuck::cast_slice_mut(map)[..*len]).into(),
        }
    }

    /// Returns whether the optimizer states are stored in host memory or in a file although the job
    /// trains on a GPU.
    pub fn is_offloaded(&self, ops: &dyn Ops) -> bool {
        !self.is_empty() && self.unsynchronized_view().is_on_host() != ops.is_host()
    }

    /// Starts to copy the optimizer states from their offload storage to `to`, a buffer in device
    /// memory. The copy waits for the event `free`, after which `to` may be overwritten. Returns
    /// the event that completes with the copy.
    pub fn start_copy_in(&mut self, ops: &dyn Ops, to: ViewMut, free: &Event) -> Event {
        let after = [self.last_copy.clone(), free.clone()];
        self.last_copy = ops.copy_async(to, self.unsynchronized_view(), &after);
        self.last_copy.clone()
    }

    /// Starts to copy updated optimizer states from `from`, a buffer in device memory, back to
    /// their offload storage. Returns the event that completes with the copy.
    pub fn start_copy_out(&mut self, ops: &dyn Ops, from: View) -> Event {
        let after = [self.last_copy.clone()];
        self.last_copy = ops.copy_async(self.unsynchronized_view_mut(), from, &after);
        self.last_copy.clone()
    }

    /// Asks the operating system to read the optimizer states from their file into memory ahead of
    /// their use. Does nothing for states in memory.
    pub fn read_ahead(&self) {
        if let StateStorage::File { map, .. } = &self.storage {
            // only advice: without it pages are read when they are accessed
            let _ = map.advise(Advice::WillNeed);
        }
    }

    /// Starts to write changed optimizer states to the file in which they are offloaded, and
    /// removes them from this process's resident memory. Does nothing for states in memory.
    pub fn evict_pages(&self) {
        if let StateStorage::File { map, .. } = &self.storage {
            self.wait_for_copies();
            // both are advice: pages that are not written now are written later
            let _ = map.flush_async();
            // SAFETY: pages of a shared mapping are read from the file again, so no data are lost.
            let _ = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
    }
}

impl Drop for StateVector {
    fn drop(&mut self) {
        if self.last_copy.synchronize().is_err() {
            // a copy may still be running, so the memory must not be freed
            std::mem::forget(std::mem::replace(&mut self.storage, StateStorage::Memory(Buf::default())));
        }
    }
}

/// Creates a file in the directory `directory` and removes its name at once, so that the file
/// disappears when it is closed. Creates the directory if necessary.
fn create_unlinked_file(directory: &Path) -> io::Result<File> {
    fs::create_dir_all(directory)?;
    let number = FILE_COUNTER.fetch_add(1, Ordering::Relaxed);
    let path = directory.join(format!(".launch-states-{}-{number}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Cpu;

    /// Reads how many kilobytes of the mapped files below `directory` are resident in memory.
    fn read_resident_kilobytes(directory: &Path) -> u64 {
        let maps = fs::read_to_string("/proc/self/smaps").expect("smaps");
        let mut is_below = false;
        let mut sum = 0;
        for line in maps.lines() {
            if line.contains('-') && line.contains(' ') && !line.contains("kB") {
                is_below = line.contains(&*directory.to_string_lossy());
            } else if let Some(rss) = line.strip_prefix("Rss:").filter(|_| is_below) {
                sum += rss.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
            }
        }
        sum
    }

    #[test]
    fn evicted_states_use_no_memory_and_are_read_again() {
        let directory = tempfile::tempdir().expect("directory");
        let mut states = StateVector::zeroed(
            &Cpu::new(1),
            1 << 20,
            Some(&OffloadTarget::Files(directory.path().join("new"))),
        )
        .expect("states");
        assert!(
            fs::read_dir(directory.path().join("new")).expect("directory").next().is_none(),
            "a file remains"
        );
        assert!(states.view().host_slice().iter().all(|x| *x == 0.0));
        states.view_mut().host_slice_mut().iter_mut().enumerate().for_each(|(i, x)| *x = i as f32);
        assert!(
            read_resident_kilobytes(directory.path()) >= 4096,
            "4 MiB are resident while the states are used"
        );
        states.evict_pages();
        assert_eq!(read_resident_kilobytes(directory.path()), 0);
        states.read_ahead();
        assert!(states.view().host_slice().iter().enumerate().all(|(i, x)| *x == i as f32));
    }

    #[test]
    fn unusable_offload_directories_are_errors() {
        let directory = tempfile::tempdir().expect("directory");
        let file = directory.path().join("file");
        fs::write(&file, "").expect("file");
        let no_directory = OffloadTarget::Files(file);
        assert!(StateVector::zeroed(&Cpu::new(1), 4, Some(&no_directory)).is_err());
        let usable = OffloadTarget::Files(directory.path().to_owned());
        let too_much =
            StateVector::zeroed(&Cpu::new(1), 1 << 50, Some(&usable)).err().expect("no disk is so large");
        assert!(matches!(too_much.raw_os_error(), Some(28 | 27)), "{too_much}");
        assert!(fs::read_dir(directory.path()).expect("directory").count() == 1, "a file is left");
    }
}
