//! Where a vector of optimizer states lies: in the memory that computes, in the host's, or in a file whose pages are in memory
//! only while they are used.
//!
//! A file has no name (it is unlinked as soon as it is made), so nothing is left behind however a run ends, and nobody else
//! can cut it. Its space is reserved when it is made: a full disk is found before the first step.
use contract::job::Offload;
use device::{Buf, Dtype, Ops, View, ViewMut, needed_for, storage::Event};
use memmap2::{Advice, MmapMut, UncheckedAdvice};
use nix::fcntl::posix_fallocate;
use std::{
    fs::{self, File},
    io,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// A vector of states.
pub struct States {
    place: Place,
    /// Where they don't lie in the memory that computes: copies from and to them end there.
    busy: Event,
}

enum Place {
    Memory(Buf),
    File { map: MmapMut, len: usize },
}

/// Distinguishes the files of one process.
static COUNT: AtomicU64 = AtomicU64::new(0);

impl States {
    /// `len` zeros where ops compute, or where `offload` says.
    pub fn zeroed(ops: &dyn Ops, len: usize, offload: Option<&Offload>) -> io::Result<Self> {
        let place = match offload.filter(|_| len > 0) {
            None => Place::Memory(needed_for("the optimizer's states", || ops.zeroed(Dtype::F32, len))),
            Some(Offload::Cpu) => {
                Place::Memory(needed_for("the optimizer's states", || ops.staging(Dtype::F32, len)))
            }
            Some(Offload::Files(directory)) => {
                let file = nameless(directory)?;
                let bytes = i64::try_from(len * size_of::<f32>()).map_err(io::Error::other)?;
                posix_fallocate(&file, 0, bytes)?;
                // SAFETY: the file has no name, so nobody else changes or cuts it.
                let map = unsafe { MmapMut::map_mut(&file) }?;
                Place::File { map, len }
            }
        };
        Ok(States { place, busy: Event::default() })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.there().len()
    }

    /// No element?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// To read.
    pub fn view(&self) -> View<'_> {
        self.busy.wait();
        self.there()
    }

    /// To write.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        self.busy.wait();
        self.there_mut()
    }

    fn there(&self) -> View<'_> {
        match &self.place {
            Place::Memory(buf) => buf.view(),
            Place::File { map, len } => bytemuck::cast_slice(map)[..*len].into(),
        }
    }

    fn there_mut(&mut self) -> ViewMut<'_> {
        match &mut self.place {
            Place::Memory(buf) => buf.view_mut(),
            Place::File { map, len } => (&mut bytemuck::cast_slice_mut(map)[..*len]).into(),
        }
    }

    /// Do ops compute elsewhere?
    pub fn is_away(&self, ops: &dyn Ops) -> bool {
        !self.is_empty() && self.there().is_on_host() != ops.is_host()
    }

    /// Begins to copy them to where ops compute, which is free behind `free`.
    pub fn bring(&mut self, ops: &dyn Ops, to: ViewMut, free: &Event) -> Event {
        let behind = [self.busy.clone(), free.clone()];
        self.busy = ops.copy_beside(to, self.there(), &behind);
        self.busy.clone()
    }

    /// Begins to copy them back.
    pub fn take_back(&mut self, ops: &dyn Ops, from: View) -> Event {
        let behind = [self.busy.clone()];
        self.busy = ops.copy_beside(self.there_mut(), from, &behind);
        self.busy.clone()
    }

    /// They are used soon: the system begins to read them.
    pub fn expect(&self) {
        if let Place::File { map, .. } = &self.place {
            // advice: without it they are read when they are touched
            let _ = map.advise(Advice::WillNeed);
        }
    }

    /// They aren't used for a while: the system begins to write them, and this process holds them no longer.
    pub fn put_away(&self) {
        if let Place::File { map, .. } = &self.place {
            self.busy.wait();
            // advice, both: what is not written now is written later
            let _ = map.flush_async();
            // SAFETY: pages of a shared mapping are read from the file again; nothing is lost.
            let _ = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
    }
}

impl Drop for States {
    fn drop(&mut self) {
        if self.busy.reached().is_err() {
            // who knows whether copies still go on
            std::mem::forget(std::mem::replace(&mut self.place, Place::Memory(Buf::default())));
        }
    }
}

/// A new file without a name.
fn nameless(directory: &Path) -> io::Result<File> {
    fs::create_dir_all(directory)?;
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = directory.join(format!(".launch-states-{}-{number}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Cpu;

    /// Kilobytes of this process's pages of files below `directory`.
    fn resident(directory: &Path) -> u64 {
        let maps = fs::read_to_string("/proc/self/smaps").expect("smaps");
        let mut ours = false;
        let mut sum = 0;
        for line in maps.lines() {
            if line.contains('-') && line.contains(' ') && !line.contains("kB") {
                ours = line.contains(&*directory.to_string_lossy());
            } else if let Some(rss) = line.strip_prefix("Rss:").filter(|_| ours) {
                sum += rss.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
            }
        }
        sum
    }

    #[test]
    fn what_is_put_away_is_not_held_and_comes_back() {
        let directory = tempfile::tempdir().expect("directory");
        let mut states =
            States::zeroed(&Cpu::new(1), 1 << 20, Some(&Offload::Files(directory.path().join("new"))))
                .expect("states");
        assert!(
            fs::read_dir(directory.path().join("new")).expect("directory").next().is_none(),
            "a file is left"
        );
        assert!(states.view().host().iter().all(|x| *x == 0.0));
        states.view_mut().host().iter_mut().enumerate().for_each(|(i, x)| *x = i as f32);
        assert!(resident(directory.path()) >= 4096, "4 MiB are held while they are used");
        states.put_away();
        assert_eq!(resident(directory.path()), 0);
        states.expect();
        assert!(states.view().host().iter().enumerate().all(|(i, x)| *x == i as f32));
    }

    #[test]
    fn a_directory_that_cannot_be_is_an_error() {
        let directory = tempfile::tempdir().expect("directory");
        let file = directory.path().join("file");
        fs::write(&file, "").expect("file");
        let no_directory = Offload::Files(file);
        assert!(States::zeroed(&Cpu::new(1), 4, Some(&no_directory)).is_err());
        let there = Offload::Files(directory.path().to_owned());
        let too_much =
            States::zeroed(&Cpu::new(1), 1 << 50, Some(&there)).err().expect("no disk is so large");
        assert!(matches!(too_much.raw_os_error(), Some(28 | 27)), "{too_much}");
        assert!(fs::read_dir(directory.path()).expect("directory").count() == 1, "a file is left");
    }
}
