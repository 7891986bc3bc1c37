//! Verifies every byte of a checkpoint, or of every checkpoint in a directory, and reports all
//! problems.
use crate::checkpoint::Checkpoint;
use crate::diagnosis::diagnose;
use crate::disk::{BLOCK, BlockFile, Buffers, Directory, ReadJob, exists, stream};
use crate::error::{CkptError, Damage, DamageReason, MissingPart, RemoteShard, Result};
use crate::external::values::non_finite_values;
use crate::external::{self, scan};
use crate::formats::safetensors;
use crate::hash::Hash;
use crate::manifest::{FileEntry, MANIFEST, Manifest};
use crate::remote_shards::RemoteShards;
use crate::root::{self, DELETING, LATEST, LATEST_NEW, REPLACED, SAVING};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The result of [`verify`].
#[derive(Clone, Debug, Serialize)]
pub struct VerifyReport {
    /// The path that was verified.
    pub path: PathBuf,
    /// The checkpoints, newest first.
    pub checkpoints: Vec<CheckpointReport>,
    /// Problems of the directory that contains the checkpoints, such as `latest`.
    pub problems: Vec<Damage>,
    /// Likely mistakes without damage: a stale `latest`, a missing random state, NaN values.
    pub warnings: Vec<String>,
    /// Notices.
    pub notes: Vec<String>,
}

/// Options of [`verify_with`].
#[derive(Clone, Copy, Debug, Default)]
pub struct VerifyOptions {
    /// Also search every tensor for NaN and infinite values.
    pub values: bool,
}

/// The result for one checkpoint.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CheckpointReport {
    /// The checkpoint directory.
    pub path: PathBuf,
    /// Step of the checkpoint; `None` when the manifest cannot be read.
    pub step: Option<u64>,
    /// Bytes verified.
    pub bytes: u64,
    /// Blocks verified; members of files for external checkpoints.
    pub blocks: u64,
    /// Damaged and missing files.
    pub problems: Vec<Damage>,
    /// Shards on other hosts, which were not verified.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub elsewhere: Vec<RemoteShard>,
}

impl VerifyReport {
    /// True when nothing is damaged.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty() && self.checkpoints.iter().all(|c| c.problems.is_empty())
    }

    /// All problems, each with its checkpoint or directory.
    pub fn problems(&self) -> impl Iterator<Item = (&Path, &Damage)> {
        let in_checkpoints =
            self.checkpoints.iter().flat_map(|c| c.problems.iter().map(move |p| (c.path.as_path(), p)));
        self.problems.iter().map(|p| (self.path.as_path(), p)).chain(in_checkpoints)
    }
}

/// Calls [`verify_with`] with the default options.
pub fn verify(path: &Path) -> Result<VerifyReport> {
    verify_with(path, VerifyOptions::default())
}

/// Verifies the checkpoint at `path`, or each one in the directory `path` and `latest`.
///
/// # Errors
/// Only when there is no checkpoint, or the directory cannot be listed. Damage is in the report.
pub fn verify_with(path: &Path, options: VerifyOptions) -> Result<VerifyReport> {
    let mut report = verify_files(path, options)?;
    for c in &report.checkpoints {
        let note = |s: &RemoteShard| {
            format!("{}: {} is on host {} and was not verified", c.path.display(), s.file, s.host)
        };
        report.notes.extend(c.elsewhere.iter().map(note));
    }
    let native = report
        .checkpoints
        .iter()
        .filter(|c| exists(&c.path.join(MANIFEST)) && c.problems.is_empty() && c.elsewhere.is_empty());
    for path in native.filter(|_| options.values).map(|c| c.path.clone()).collect::<Vec<_>>() {
        let lines = non_finite_values(&Checkpoint::open(&path)?)?;
        report.warnings.extend(lines.into_iter().map(|line| format!("{}: {line}", path.display())));
    }
    Ok(report)
}

fn verify_files(path: &Path, options: VerifyOptions) -> Result<VerifyReport> {
    let mut report = VerifyReport {
        path: path.to_owned(),
        checkpoints: Vec::new(),
        problems: Vec::new(),
        warnings: Vec::new(),
        notes: Vec::new(),
    };
    if !exists(path) {
        return Err(CkptError::NotFound { path: path.to_owned() });
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if path.is_file() {
        verify_external(path, &name, options, &mut report)?;
        return Ok(report);
    }
    if exists(&path.join(MANIFEST)) || root::step_of(&name).is_some() {
        report.checkpoints.push(verify_one(path, root::step_of(&name))?);
        return Ok(report);
    }
    let steps = root::steps(path)?;
    for &step in &steps {
        let path = root::locate(path, step).unwrap_or_else(|| path.join(root::step_name(step)));
        report.checkpoints.push(verify_one(&path, Some(step))?);
    }
    if steps.is_empty() && verify_external(path, &name, options, &mut report)? {
        return Ok(report);
    }
    // a native `latest` contains a hash of itself
    let is_native = |text: Vec<u8>| String::from_utf8_lossy(&text).contains("blake3:");
    let latest = Directory::open(path)?.read(LATEST, 4096).ok();
    if steps.is_empty() && latest.is_some_and(|text| !is_native(text)) {
        return Err(CkptError::not_a_checkpoint(path, diagnose(path)));
    }
    if steps.is_empty() && !exists(&path.join(LATEST)) {
        return Err(CkptError::not_a_checkpoint(path, diagnose(path)));
    }
    verify_latest(path, &steps, &mut report);
    for name in Directory::open(path)?.names()? {
        if [SAVING, DELETING, REPLACED, LATEST_NEW].iter().any(|p| name.starts_with(p)) {
            report.notes.push(format!(
                "{name} belongs to a save in progress or an interrupted one; the next save removes it"
            ));
        }
    }
    Ok(report)
}

/// Verifies an external checkpoint against the CRC-32s of its files. False when there is none.
fn verify_external(
    path: &Path,
    name: &str,
    options: VerifyOptions,
    report: &mut VerifyReport,
) -> Result<bool> {
    let opened = match external::open(path) {
        Ok(None) => return Ok(false),
        Ok(Some(found)) => found,
        Err(e @ CkptError::NotACheckpoint { .. }) if path.is_file() => return Err(e),
        Err(e) if e.is_checkpoint_at_fault() => {
            report.checkpoints.push(report_unreadable(path, name, e)?);
            return Ok(true);
        }
        Err(e) => return Err(e),
    };
    let (one, warnings) = opened.verify()?;
    report.warnings.extend(warnings);
    report.notes.extend(opened.facts().notices.iter().cloned());
    if options.values && one.problems.is_empty() {
        report.warnings.extend(non_finite_values(&opened)?);
    }
    report.checkpoints.push(one);
    Ok(true)
}

/// Reports a checkpoint that cannot be opened: the error, and the problems of each file.
fn report_unreadable(path: &Path, name: &str, e: CkptError) -> Result<CheckpointReport> {
    let at = match &e {
        CkptError::Damaged { path, .. } | CkptError::Missing { path, .. } if path.is_dir() => path.clone(),
        _ => path.to_owned(),
    };
    let mut problems = vec![damage_of(name, e)];
    let scan = match at.is_dir() {
        true => scan::scan_directory(&at, &Default::default(), scan::DEPTH)?,
        false => scan::ScanReport::default(),
    };
    problems.extend(scan.problems.into_iter().filter(|p| p.file != problems[0].file).collect::<Vec<_>>());
    Ok(CheckpointReport { path: at, bytes: scan.bytes, blocks: scan.members, problems, ..Default::default() })
}

fn verify_latest(path: &Path, steps: &[u64], report: &mut VerifyReport) {
    match (root::latest(path).and_then(|_| root::latest_step(path)), steps.first()) {
        (Ok(Some(step)), Some(&newest)) if step < newest => report.warnings.push(format!(
            "`latest` names {}, but {} is newer: a save was interrupted after its checkpoint was complete",
            root::step_name(step),
            root::step_name(newest)
        )),
        (Ok(Some(_)), _) => {}
        (Ok(None), _) => report.notes.push("no `latest`; the newest checkpoint is used".into()),
        (Err(e), _) => report.problems.push(damage_of(LATEST, e)),
    }
}

/// Converts an error of opening or reading to a problem of a file.
fn damage_of(file: &str, e: CkptError) -> Damage {
    match e {
        CkptError::Damaged { damage, .. } => *damage,
        CkptError::Missing { part: MissingPart::File(name), .. } if name == file => {
            Damage::of_file(file, DamageReason::FileMissing)
        }
        CkptError::Missing { part, .. } => Damage::of_file(file, DamageReason::PartMissing(part)),
        CkptError::NotACheckpoint { diagnosis, .. } => {
            Damage::of_file(file, DamageReason::NotACheckpoint(diagnosis))
        }
        other => Damage::of_file(file, other.to_string()),
    }
}

fn verify_one(path: &Path, named: Option<u64>) -> Result<CheckpointReport> {
    let mut report = CheckpointReport { path: path.to_owned(), ..CheckpointReport::default() };
    let loaded = Directory::open(path).and_then(|directory| Ok((Manifest::load(&directory)?, directory)));
    let (manifest, directory) = match loaded {
        Ok(loaded) => loaded,
        Err(e) => {
            report.problems.push(damage_of(MANIFEST, e));
            return Ok(report);
        }
    };
    let step = manifest.facts.step;
    report.step = Some(step);
    if let Some(named) = named.filter(|&n| n != step) {
        let reason = DamageReason::StepMismatch { named, stored: step };
        report.problems.push(Damage::of_file(MANIFEST, reason));
    }
    let buffers = Buffers::default();
    let remote = RemoteShards::new(path, &manifest);
    for file in 0..manifest.files.len() {
        let name = &manifest.files[file].name;
        if let Some(host) = remote.remote_host(file)
            && !directory.has(name)?
        {
            let host = host.to_string();
            report.elsewhere.push(RemoteShard { file: name.clone(), host });
            continue;
        }
        verify_file(&directory, &manifest, file, &buffers, &mut report)?;
    }
    for file in manifest.parity.iter().flatten() {
        verify_parity(&directory, file, &buffers, &mut report)?;
    }
    for name in directory.names()? {
        if name != MANIFEST && manifest.all_files().all(|f| f.name != name) {
            report.problems.push(Damage::of_file(name, DamageReason::UnexpectedFile));
        }
    }
    Ok(report)
}

fn verify_file(
    directory: &Directory,
    manifest: &Manifest,
    file: usize,
    buffers: &Buffers,
    report: &mut CheckpointReport,
) -> Result<()> {
    let entry = &manifest.files[file];
    let size = match BlockFile::open(directory, &entry.name) {
        Ok(open) => open.size(),
        Err(e) => {
            let mut damage = damage_of(&entry.name, e);
            damage.tensors = tensors_from(manifest, file, 0);
            report.problems.push(damage);
            return Ok(());
        }
    };
    let problem = |block: Option<u64>, tensors: Vec<String>, reason: DamageReason| Damage {
        file: entry.name.clone(),
        block,
        tensors,
        reason,
    };
    if size < entry.bytes {
        let tensors = tensors_from(manifest, file, size / BLOCK as u64);
        report.problems.push(problem(
            None,
            tensors,
            DamageReason::SizeMismatch { expected: entry.bytes, found: size },
        ));
    } else if size > entry.bytes {
        let reason = DamageReason::SizeMismatch { expected: entry.bytes, found: size };
        report.problems.push(problem(None, Vec::new(), reason));
    }
    let mut first_block_is_valid = false;
    // blocks that are only partly present are reported above
    let readable = if size < entry.bytes { size / BLOCK as u64 } else { entry.blocks.len() as u64 };
    let jobs = [ReadJob { file, size: entry.bytes, blocks: 0..readable }];
    let open = |_| BlockFile::open(directory, &entry.name);
    stream(buffers, &jobs, open, |(job, read)| {
        let window = match read {
            Ok(window) => window,
            Err(e) => {
                let tensors = manifest.tensors_in(file, job.blocks.start);
                let detail = format!("blocks {}..{}: {e}", job.blocks.start, job.blocks.end);
                report.problems.push(problem(Some(job.blocks.start), tensors, detail.into()));
                return Ok(());
            }
        };
        for (block, bytes) in job.blocks.clone().zip(window.chunks(BLOCK)) {
            report.blocks += 1;
            report.bytes += bytes.len() as u64;
            if entry.blocks[block as usize] != Hash::digest(bytes) {
                let tensors = manifest.tensors_in(file, block);
                report.problems.push(problem(Some(block), tensors, DamageReason::HashMismatch));
            } else if block == 0 {
                first_block_is_valid = true;
            }
        }
        Ok(())
    })?;
    if size == entry.bytes && first_block_is_valid {
        let reason = header_problem(directory, manifest, file);
        report.problems.extend(reason.map(|reason| problem(Some(0), Vec::new(), reason)));
    }
    Ok(())
}

/// Verifies a parity file, which contains no tensors.
fn verify_parity(
    directory: &Directory,
    entry: &FileEntry,
    buffers: &Buffers,
    report: &mut CheckpointReport,
) -> Result<()> {
    let problem = |block, reason| Damage { file: entry.name.clone(), block, tensors: Vec::new(), reason };
    match directory.size_of(&entry.name) {
        Ok(Some(size)) if size == entry.bytes => {}
        Ok(Some(size)) => {
            let reason = DamageReason::SizeMismatch { expected: entry.bytes, found: size };
            report.problems.push(problem(None, reason));
            return Ok(());
        }
        Ok(None) => {
            report.problems.push(problem(None, DamageReason::FileMissing));
            return Ok(());
        }
        Err(e) => {
            report.problems.push(damage_of(&entry.name, e));
            return Ok(());
        }
    }
    let jobs = [ReadJob { file: 0, size: entry.bytes, blocks: 0..entry.blocks.len() as u64 }];
    stream(
        buffers,
        &jobs,
        |_| BlockFile::open(directory, &entry.name),
        |(job, read)| {
            let window = match read {
                Ok(window) => window,
                Err(e) => {
                    report.problems.push(problem(Some(job.blocks.start), e.to_string().into()));
                    return Ok(());
                }
            };
            for (block, bytes) in job.blocks.clone().zip(window.chunks(BLOCK)) {
                report.blocks += 1;
                report.bytes += bytes.len() as u64;
                if entry.blocks.get(block as usize) != Some(&Hash::digest(bytes)) {
                    report.problems.push(problem(Some(block), DamageReason::HashMismatch));
                }
            }
            Ok(())
        },
    )
}

/// Compares the header of a shard with the manifest.
fn header_problem(directory: &Directory, manifest: &Manifest, file: usize) -> Option<DamageReason> {
    use std::os::unix::fs::FileExt;
    let (shard, size) = match directory.open_file(&manifest.files[file].name, nix::fcntl::OFlag::empty()) {
        Ok(open) => open,
        Err(e) => return Some(damage_of("", e).reason),
    };
    let header = match safetensors::read_header(size, |at, out| shard.read_exact_at(out, at)) {
        Ok(header) => header,
        Err(error) => return Some(error.into()),
    };
    let mut expected = manifest.expected_header(file);
    for e in &header.entries {
        let elements: u64 = e.shape.iter().product();
        if expected.remove(&e.name) != Some((e.dtype, elements, e.bytes.clone())) {
            return Some(DamageReason::HeaderMismatch { piece: e.name.clone() });
        }
    }
    expected.into_keys().next().map(|piece| DamageReason::HeaderMismatch { piece })
}

/// `role/name` of the tensors with bytes in or after this block.
fn tensors_from(manifest: &Manifest, file: usize, block: u64) -> Vec<String> {
    let start = block * BLOCK as u64;
    let after = |t: &&crate::manifest::TensorEntry| {
        t.pieces.iter().any(|p| p.file == file && p.bytes(t.dtype).end > start)
    };
    manifest.tensors.iter().filter(after).map(|t| t.label()).collect()
}
