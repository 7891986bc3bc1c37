//! Verifies every byte of a checkpoint, or of every checkpoint in a directory, and reports all
//! problems.
use crate::checkpoint::Checkpoint;
use crate::checkpoint_dir::{
    self, DELETING_PREFIX, LATEST_FILE, LATEST_TEMP_FILE, REPLACED_PREFIX, SAVING_PREFIX,
};
use crate::diagnosis::diagnose_directory;
use crate::disk::{BLOCK, BlockReader, BlockRequest, Directory, DiskBufferPool, exists, stream_windows};
use crate::error::{CkptError, Damage, DamageReason, MissingPart, RemoteShard, Result};
use crate::external::non_finite_values::find_non_finite_values;
use crate::external::{self, scan};
use crate::formats::safetensors;
use crate::hash::Hash;
use crate::manifest::{FileEntry, MANIFEST_FILE, Manifest};
use crate::remote_shards::RemoteShards;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The result of [`verify_checkpoints`].
#[derive(Clone, Debug, Serialize)]
pub struct VerifyReport {
    /// The path that was verified.
    pub path: PathBuf,
    /// The checkpoints, newest first.
    pub checkpoints: Vec<CheckpointReport>,
    /// Problems of the directory that contains the checkpoints, such as a damaged `latest`.
    pub problems: Vec<Damage>,
    /// Lines about likely mistakes that aren't damage, such as a stale `latest`, a missing RNG
    /// state or NaN values.
    pub warnings: Vec<String>,
    /// Lines about facts that aren't mistakes, such as shards that other hosts store.
    pub notes: Vec<String>,
}

/// Options of [`verify_checkpoints_with`].
#[derive(Clone, Copy, Debug, Default)]
pub struct VerifyOptions {
    /// Whether to also search every tensor for NaN and infinite values, which become warnings.
    pub values: bool,
}

/// The result of the verification of one checkpoint.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CheckpointReport {
    /// Directory of the checkpoint.
    pub path: PathBuf,
    /// Step of the checkpoint, or `None` if the step cannot be read.
    pub step: Option<u64>,
    /// Number of verified bytes.
    pub bytes: u64,
    /// Number of verified blocks. For an external checkpoint, the number of verified members of
    /// files.
    pub blocks: u64,
    /// Damaged, missing and unexpected files.
    pub problems: Vec<Damage>,
    /// Shards that other hosts store and that were therefore not verified.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub elsewhere: Vec<RemoteShard>,
}

impl VerifyReport {
    /// Returns true if no problem was found in the checkpoints or their directory. Warnings do not
    /// count as problems.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty() && self.checkpoints.iter().all(|c| c.problems.is_empty())
    }

    /// Iterates over all problems, each with the path of its checkpoint or directory.
    pub fn all_problems(&self) -> impl Iterator<Item = (&Path, &Damage)> {
        let in_checkpoints =
            self.checkpoints.iter().flat_map(|c| c.problems.iter().map(move |p| (c.path.as_path(), p)));
        self.problems.iter().map(|p| (self.path.as_path(), p)).chain(in_checkpoints)
    }
}

/// Verifies every byte of the checkpoints at `path`, as [`verify_checkpoints_with`] does with the
/// default options. Does not search for non-finite values.
pub fn verify_checkpoints(path: &Path) -> Result<VerifyReport> {
    verify_checkpoints_with(path, VerifyOptions::default())
}

/// Verifies every byte of the checkpoint at `path`. If `path` is a directory of checkpoints,
/// verifies every checkpoint and `latest`.
///
/// # Errors
/// Fails if there is no checkpoint, or a directory cannot be listed. Damage is not an error. The
/// report lists all damage.
pub fn verify_checkpoints_with(path: &Path, options: VerifyOptions) -> Result<VerifyReport> {
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
        .filter(|c| exists(&c.path.join(MANIFEST_FILE)) && c.problems.is_empty() && c.elsewhere.is_empty());
    for path in native.filter(|_| options.values).map(|c| c.path.clone()).collect::<Vec<_>>() {
        let lines = find_non_finite_values(&Checkpoint::open(&path)?)?;
        report.warnings.extend(lines.into_iter().map(|line| format!("{}: {line}", path.display())));
    }
    Ok(report)
}

/// Verifies every stored byte of the checkpoints at `path`. If `options.values` is true, also
/// searches an external checkpoint for NaN and infinite values. Never searches native checkpoints
/// for such values.
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
    if exists(&path.join(MANIFEST_FILE)) || checkpoint_dir::parse_step_dir_name(&name).is_some() {
        report.checkpoints.push(verify_native(path, checkpoint_dir::parse_step_dir_name(&name))?);
        return Ok(report);
    }
    let steps = checkpoint_dir::list_steps(path)?;
    for &step in &steps {
        let path = checkpoint_dir::locate_step(path, step)
            .unwrap_or_else(|| path.join(checkpoint_dir::step_dir_name(step)));
        report.checkpoints.push(verify_native(&path, Some(step))?);
    }
    if steps.is_empty() && verify_external(path, &name, options, &mut report)? {
        return Ok(report);
    }
    // a native `latest` contains a hash of itself
    let is_native = |text: Vec<u8>| String::from_utf8_lossy(&text).contains("blake3:");
    let latest = Directory::open(path)?.read_file(LATEST_FILE, 4096).ok();
    if steps.is_empty() && latest.is_some_and(|text| !is_native(text)) {
        return Err(CkptError::not_a_checkpoint(path, diagnose_directory(path)));
    }
    if steps.is_empty() && !exists(&path.join(LATEST_FILE)) {
        return Err(CkptError::not_a_checkpoint(path, diagnose_directory(path)));
    }
    verify_latest(path, &steps, &mut report);
    for name in Directory::open(path)?.list_names()? {
        if [SAVING_PREFIX, DELETING_PREFIX, REPLACED_PREFIX, LATEST_TEMP_FILE]
            .iter()
            .any(|p| name.starts_with(p))
        {
            report.notes.push(format!(
                "{name} belongs to a save in progress or an interrupted one; the next save removes it"
            ));
        }
    }
    Ok(report)
}

/// Verifies the external checkpoint at `path` against the CRC-32s in its files, and adds the result
/// to `report`. Returns whether there is an external checkpoint at `path`, damaged or not. `name`
/// is the file name of `path`.
fn verify_external(
    path: &Path,
    name: &str,
    options: VerifyOptions,
    report: &mut VerifyReport,
) -> Result<bool> {
    let opened = match external::open_checkpoint(path) {
        Ok(None) => return Ok(false),
        Ok(Some(found)) => found,
        Err(e @ CkptError::NotACheckpoint { .. }) if path.is_file() => return Err(e),
        Err(e) if e.is_checkpoint_at_fault() => {
            report.checkpoints.push(unreadable_report(path, name, e)?);
            return Ok(true);
        }
        Err(e) => return Err(e),
    };
    let (one, warnings) = opened.verify()?;
    report.warnings.extend(warnings);
    report.notes.extend(opened.facts().notices.iter().cloned());
    if options.values && one.problems.is_empty() {
        report.warnings.extend(find_non_finite_values(&opened)?);
    }
    report.checkpoints.push(one);
    Ok(true)
}

/// Makes the report of an external checkpoint that cannot be opened because of the error `e`. The
/// problems are the error, and all damage that a scan of the files finds.
fn unreadable_report(path: &Path, name: &str, e: CkptError) -> Result<CheckpointReport> {
    let at = match &e {
        CkptError::Damaged { path, .. } | CkptError::Missing { path, .. } if path.is_dir() => path.clone(),
        _ => path.to_owned(),
    };
    let mut problems = vec![convert_to_damage(name, e)];
    let scan = match at.is_dir() {
        true => scan::check_directory_files(&at, &Default::default(), scan::SCAN_DEPTH)?,
        false => scan::ScanReport::default(),
    };
    problems.extend(scan.problems.into_iter().filter(|p| p.file != problems[0].file).collect::<Vec<_>>());
    Ok(CheckpointReport { path: at, bytes: scan.bytes, blocks: scan.members, problems, ..Default::default() })
}

/// Verifies `latest` in the checkpoint directory `path`. Adds a problem if `latest` is damaged, a
/// warning if it does not name the newest step, and a note if it is missing. `steps` are sorted,
/// newest first.
fn verify_latest(path: &Path, steps: &[u64], report: &mut VerifyReport) {
    match (
        checkpoint_dir::find_latest(path).and_then(|_| checkpoint_dir::read_latest_step(path)),
        steps.first(),
    ) {
        (Ok(Some(step)), Some(&newest)) if step < newest => report.warnings.push(format!(
            "`latest` names {}, but {} is newer: a save was interrupted after its checkpoint was complete",
            checkpoint_dir::step_dir_name(step),
            checkpoint_dir::step_dir_name(newest)
        )),
        (Ok(Some(_)), _) => {}
        (Ok(None), _) => report.notes.push("no `latest`; the newest checkpoint is used".into()),
        (Err(e), _) => report.problems.push(convert_to_damage(LATEST_FILE, e)),
    }
}

/// Converts an error of opening or reading the file `file` to a problem for the report.
fn convert_to_damage(file: &str, e: CkptError) -> Damage {
    match e {
        CkptError::Damaged { damage, .. } => *damage,
        CkptError::Missing { part: MissingPart::File(name), .. } if name == file => {
            Damage::for_file(file, DamageReason::FileMissing)
        }
        CkptError::Missing { part, .. } => Damage::for_file(file, DamageReason::PartMissing(part)),
        CkptError::NotACheckpoint { diagnosis, .. } => {
            Damage::for_file(file, DamageReason::NotACheckpoint(diagnosis))
        }
        other => Damage::for_file(file, other.to_string()),
    }
}

/// Verifies every file of the native checkpoint at `path`, except shards on other hosts. `named` is
/// the step in the name of the directory, which must equal the step in the manifest, or `None` if
/// the name has no step.
fn verify_native(path: &Path, named: Option<u64>) -> Result<CheckpointReport> {
    let mut report = CheckpointReport { path: path.to_owned(), ..CheckpointReport::default() };
    let loaded = Directory::open(path).and_then(|directory| Ok((Manifest::load(&directory)?, directory)));
    let (manifest, directory) = match loaded {
        Ok(loaded) => loaded,
        Err(e) => {
            report.problems.push(convert_to_damage(MANIFEST_FILE, e));
            return Ok(report);
        }
    };
    let step = manifest.facts.step;
    report.step = Some(step);
    if let Some(named) = named.filter(|&n| n != step) {
        let reason = DamageReason::StepMismatch { named, stored: step };
        report.problems.push(Damage::for_file(MANIFEST_FILE, reason));
    }
    let buffers = DiskBufferPool::default();
    let remote = RemoteShards::new(path, &manifest);
    for file in 0..manifest.files.len() {
        let name = &manifest.files[file].name;
        if let Some(host) = remote.remote_host(file)
            && !directory.has_entry(name)?
        {
            let host = host.to_string();
            report.elsewhere.push(RemoteShard { file: name.clone(), host });
            continue;
        }
        verify_shard(&directory, &manifest, file, &buffers, &mut report)?;
    }
    for file in manifest.parity.iter().flatten() {
        verify_parity_file(&directory, file, &buffers, &mut report)?;
    }
    for name in directory.list_names()? {
        if name != MANIFEST_FILE && manifest.all_files().all(|f| f.name != name) {
            report.problems.push(Damage::for_file(name, DamageReason::UnexpectedFile));
        }
    }
    Ok(report)
}

/// Verifies the size, the blocks and the header of the shard with index `file`, and adds its
/// problems to `report`.
fn verify_shard(
    directory: &Directory,
    manifest: &Manifest,
    file: usize,
    buffers: &DiskBufferPool,
    report: &mut CheckpointReport,
) -> Result<()> {
    let entry = &manifest.files[file];
    let size = match BlockReader::open(directory, &entry.name) {
        Ok(open) => open.size(),
        Err(e) => {
            let mut damage = convert_to_damage(&entry.name, e);
            damage.tensors = list_tensors_from_block(manifest, file, 0);
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
        let tensors = list_tensors_from_block(manifest, file, size / BLOCK as u64);
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
    // the size mismatch above already reports blocks that are only partly present
    let readable = if size < entry.bytes { size / BLOCK as u64 } else { entry.blocks.len() as u64 };
    let jobs = [BlockRequest { file, size: entry.bytes, blocks: 0..readable }];
    let open = |_| BlockReader::open(directory, &entry.name);
    stream_windows(buffers, &jobs, open, |(job, read)| {
        let window = match read {
            Ok(window) => window,
            Err(e) => {
                let tensors = manifest.tensors_in_block(file, job.blocks.start);
                let detail = format!("blocks {}..{}: {e}", job.blocks.start, job.blocks.end);
                report.problems.push(problem(Some(job.blocks.start), tensors, detail.into()));
                return Ok(());
            }
        };
        for (block, bytes) in job.blocks.clone().zip(window.chunks(BLOCK)) {
            report.blocks += 1;
            report.bytes += bytes.len() as u64;
            if entry.blocks[block as usize] != Hash::digest(bytes) {
                let tensors = manifest.tensors_in_block(file, block);
                report.problems.push(problem(Some(block), tensors, DamageReason::HashMismatch));
            } else if block == 0 {
                first_block_is_valid = true;
            }
        }
        Ok(())
    })?;
    if size == entry.bytes && first_block_is_valid {
        let reason = find_header_problem(directory, manifest, file);
        report.problems.extend(reason.map(|reason| problem(Some(0), Vec::new(), reason)));
    }
    Ok(())
}

/// Verifies a parity file of a native checkpoint, and adds its problems to `report`.
fn verify_parity_file(
    directory: &Directory,
    entry: &FileEntry,
    buffers: &DiskBufferPool,
    report: &mut CheckpointReport,
) -> Result<()> {
    let problem = |block, reason| Damage { file: entry.name.clone(), block, tensors: Vec::new(), reason };
    match directory.file_size(&entry.name) {
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
            report.problems.push(convert_to_damage(&entry.name, e));
            return Ok(());
        }
    }
    let jobs = [BlockRequest { file: 0, size: entry.bytes, blocks: 0..entry.blocks.len() as u64 }];
    stream_windows(
        buffers,
        &jobs,
        |_| BlockReader::open(directory, &entry.name),
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

/// Compares the header of a shard with the manifest. Returns the first difference, or `None` if the
/// header matches.
fn find_header_problem(directory: &Directory, manifest: &Manifest, file: usize) -> Option<DamageReason> {
    use std::os::unix::fs::FileExt;
    let (shard, size) = match directory.open_file(&manifest.files[file].name, nix::fcntl::OFlag::empty()) {
        Ok(open) => open,
        Err(e) => return Some(convert_to_damage("", e).reason),
    };
    let header = match safetensors::read_header(size, |at, out| shard.read_exact_at(out, at)) {
        Ok(header) => header,
        Err(error) => return Some(error.into()),
    };
    let mut expected = manifest.expected_header_entries(file);
    for e in &header.entries {
        let elements: u64 = e.shape.iter().product();
        if expected.remove(&e.name) != Some((e.dtype, elements, e.bytes.clone())) {
            return Some(DamageReason::HeaderMismatch { piece: e.name.clone() });
        }
    }
    expected.into_keys().next().map(|piece| DamageReason::HeaderMismatch { piece })
}

/// Lists the tensors with bytes in or after the block with index `block` of a shard, as
/// `role/name`.
fn list_tensors_from_block(manifest: &Manifest, file: usize, block: u64) -> Vec<String> {
    let start = block * BLOCK as u64;
    let after = |t: &&crate::manifest::TensorEntry| {
        t.pieces.iter().any(|p| p.file == file && p.byte_range(t.dtype).end > start)
    };
    manifest.tensors.iter().filter(after).map(|t| t.label()).collect()
}
