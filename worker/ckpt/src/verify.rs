//! Checks every byte of a checkpoint, or of a directory of them, and finds all problems at once.
use crate::checkpoint::Checkpoint;
use crate::disk::{BLOCK, BlockFile, Buffers, Folder, Job, exists, stream};
use crate::elsewhere::Elsewhere;
use crate::error::{CkptError, Damage, Result};
use crate::external::values::not_finite;
use crate::external::{self, sweep};
use crate::formats::safetensors;
use crate::hash::Hash;
use crate::manifest::{FileEntry, MANIFEST, Manifest};
use crate::root::{self, DELETING, LATEST, LATEST_NEW, REPLACED, SAVING};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What [`verify`] found.
#[derive(Clone, Debug, Serialize)]
pub struct VerifyReport {
    pub path: PathBuf,
    /// Newest first.
    pub checkpoints: Vec<CheckpointReport>,
    /// Problems of the directory that holds them: `latest`.
    pub problems: Vec<Damage>,
    /// What is likely a mistake, though nothing is damaged: a stale `latest`, a missing random state, values that are no
    /// numbers.
    pub warnings: Vec<String>,
    /// Things to know.
    pub notes: Vec<String>,
}

/// How to verify.
#[derive(Clone, Copy, Debug, Default)]
pub struct VerifyOptions {
    /// Look at the values of every tensor as well.
    pub values: bool,
}

/// One checkpoint.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CheckpointReport {
    pub path: PathBuf,
    /// Unknown when the manifest can't be read.
    pub step: Option<u64>,
    /// Bytes read and compared.
    pub bytes: u64,
    /// Blocks (of other programs: members of files) read and compared.
    pub blocks: u64,
    pub problems: Vec<Damage>,
    /// Shards that lie on other hosts, which were not looked at.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub elsewhere: Vec<Shard>,
}

/// A shard on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shard {
    pub file: String,
    /// Its name and id.
    pub host: String,
}

impl VerifyReport {
    /// Nothing is damaged.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty() && self.checkpoints.iter().all(|c| c.problems.is_empty())
    }

    /// All problems, with the checkpoint they are in.
    pub fn problems(&self) -> impl Iterator<Item = (&Path, &Damage)> {
        let inside =
            self.checkpoints.iter().flat_map(|c| c.problems.iter().map(move |p| (c.path.as_path(), p)));
        self.problems.iter().map(|p| (self.path.as_path(), p)).chain(inside)
    }
}

/// [`verify_with`] its defaults.
pub fn verify(path: &Path) -> Result<VerifyReport> {
    verify_with(path, VerifyOptions::default())
}

/// Verifies the checkpoint at `path`, or each one in the directory `path` and `latest`.
///
/// # Errors
/// Only when there is no checkpoint at all, or the directory can't be listed; damage is in the report.
pub fn verify_with(path: &Path, options: VerifyOptions) -> Result<VerifyReport> {
    let mut report = look(path, options)?;
    for c in &report.checkpoints {
        let lacks = |s: &Shard| {
            format!("{}: {} lies on host {}, and was not looked at", c.path.display(), s.file, s.host)
        };
        report.notes.extend(c.elsewhere.iter().map(lacks));
    }
    let native = report
        .checkpoints
        .iter()
        .filter(|c| exists(&c.path.join(MANIFEST)) && c.problems.is_empty() && c.elsewhere.is_empty());
    for path in native.filter(|_| options.values).map(|c| c.path.clone()).collect::<Vec<_>>() {
        let said = not_finite(&Checkpoint::open(&path)?)?;
        report.warnings.extend(said.into_iter().map(|line| format!("{}: {line}", path.display())));
    }
    Ok(report)
}

fn look(path: &Path, options: VerifyOptions) -> Result<VerifyReport> {
    let mut report = VerifyReport {
        path: path.to_owned(),
        checkpoints: Vec::new(),
        problems: Vec::new(),
        warnings: Vec::new(),
        notes: Vec::new(),
    };
    let not_here = |why: &str| CkptError::NotACheckpoint { path: path.to_owned(), why: why.into() };
    if !exists(path) {
        return Err(not_here("there is no such directory"));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if path.is_file() {
        verify_foreign(path, &name, options, &mut report)?;
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
    if steps.is_empty() && verify_foreign(path, &name, options, &mut report)? {
        return Ok(report);
    }
    // ours says a hash of itself as well
    let ours = |text: Vec<u8>| String::from_utf8_lossy(&text).contains("blake3:");
    let latest = Folder::open(path)?.read(LATEST, 4096).ok();
    if steps.is_empty() && latest.is_some_and(|text| !ours(text)) {
        return Err(not_here(&crate::diagnosis::seems(path)));
    }
    if steps.is_empty() && !exists(&path.join(LATEST)) {
        return Err(not_here(&crate::diagnosis::seems(path)));
    }
    verify_latest(path, &steps, &mut report);
    for name in Folder::open(path)?.names()? {
        if [SAVING, DELETING, REPLACED, LATEST_NEW].iter().any(|p| name.starts_with(p)) {
            report.notes.push(format!(
                "{name} is a save in progress or what an interrupted one has left; the next save removes it"
            ));
        }
    }
    Ok(report)
}

/// A checkpoint of another program: every byte against the CRCs of its files. False when there is none.
fn verify_foreign(
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
            report.checkpoints.push(closed(path, name, e)?);
            return Ok(true);
        }
        Err(e) => return Err(e),
    };
    let (one, warnings) = opened.verify()?;
    report.warnings.extend(warnings);
    report.notes.extend(opened.facts().notices.iter().cloned());
    if options.values && one.problems.is_empty() {
        report.warnings.extend(not_finite(&opened)?);
    }
    report.checkpoints.push(one);
    Ok(true)
}

/// A checkpoint that doesn't open: why, and what is wrong with each of its files.
fn closed(path: &Path, name: &str, e: CkptError) -> Result<CheckpointReport> {
    let at = match &e {
        CkptError::Damaged { path, .. } | CkptError::Missing { path, .. } if path.is_dir() => path.clone(),
        _ => path.to_owned(),
    };
    let mut problems = vec![damage_of(name, e)];
    let swept = match at.is_dir() {
        true => sweep::sweep(&at, &Default::default(), sweep::DEPTH)?,
        false => sweep::Swept::default(),
    };
    problems.extend(swept.problems.into_iter().filter(|p| p.file != problems[0].file).collect::<Vec<_>>());
    Ok(CheckpointReport {
        path: at,
        bytes: swept.bytes,
        blocks: swept.members,
        problems,
        ..Default::default()
    })
}

fn verify_latest(path: &Path, steps: &[u64], report: &mut VerifyReport) {
    match (root::latest(path).and_then(|_| root::latest_step(path)), steps.first()) {
        (Ok(Some(step)), Some(&newest)) if step < newest => report.warnings.push(format!(
            "`latest` names {}, though {} is newer: a save was cut short after it was complete",
            root::step_name(step),
            root::step_name(newest)
        )),
        (Ok(Some(_)), _) => {}
        (Ok(None), _) => report.notes.push("there is no `latest`; the newest checkpoint counts".into()),
        (Err(e), _) => report.problems.push(damage_of(LATEST, e)),
    }
}

/// An error of reading, as a problem of a file.
fn damage_of(file: &str, e: CkptError) -> Damage {
    let problem =
        |file: &str, why: String| Damage { file: file.to_owned(), block: None, tensors: Vec::new(), why };
    match e {
        CkptError::Damaged { damage, .. } => damage,
        CkptError::Missing { what, .. } if what == file => problem(file, "it is missing".into()),
        CkptError::Missing { what, .. } => problem(file, format!("{what} is missing")),
        CkptError::NotACheckpoint { why, .. } => problem(file, why),
        other => problem(file, other.to_string()),
    }
}

fn verify_one(path: &Path, named: Option<u64>) -> Result<CheckpointReport> {
    let mut report = CheckpointReport { path: path.to_owned(), ..CheckpointReport::default() };
    let loaded = Folder::open(path).and_then(|folder| Ok((Manifest::load(&folder)?, folder)));
    let (manifest, folder) = match loaded {
        Ok(loaded) => loaded,
        Err(e) => {
            report.problems.push(damage_of(MANIFEST, e));
            return Ok(report);
        }
    };
    let step = manifest.facts.step;
    report.step = Some(step);
    if let Some(named) = named.filter(|&n| n != step) {
        let why = format!("the folder is named for step {named}, its content is of step {step}");
        report.problems.push(Damage { file: MANIFEST.into(), block: None, tensors: Vec::new(), why });
    }
    let buffers = Buffers::default();
    let own = Elsewhere::of(path, &manifest);
    for file in 0..manifest.files.len() {
        let name = &manifest.files[file].name;
        if let Some(host) = own.host_of(file)
            && !folder.has(name)?
        {
            let host = host.to_string();
            report.elsewhere.push(Shard { file: name.clone(), host });
            continue;
        }
        verify_file(&folder, &manifest, file, &buffers, &mut report)?;
    }
    for file in manifest.parity.iter().flatten() {
        verify_parity(&folder, file, &buffers, &mut report)?;
    }
    for name in folder.names()? {
        if name != MANIFEST && manifest.all_files().all(|f| f.name != name) {
            let why = "it does not belong to the checkpoint".into();
            report.problems.push(Damage { file: name, block: None, tensors: Vec::new(), why });
        }
    }
    Ok(report)
}

fn verify_file(
    folder: &Folder,
    manifest: &Manifest,
    file: usize,
    buffers: &Buffers,
    report: &mut CheckpointReport,
) -> Result<()> {
    let entry = &manifest.files[file];
    let size = match BlockFile::open(folder, &entry.name) {
        Ok(open) => open.size(),
        Err(e) => {
            let mut damage = damage_of(&entry.name, e);
            damage.tensors = tensors_from(manifest, file, 0);
            report.problems.push(damage);
            return Ok(());
        }
    };
    let problem = |block: Option<u64>, tensors: Vec<String>, why: String| Damage {
        file: entry.name.clone(),
        block,
        tensors,
        why,
    };
    if size < entry.bytes {
        let lost = tensors_from(manifest, file, size / BLOCK as u64);
        report.problems.push(problem(
            None,
            lost,
            format!("it is cut short: {size} bytes of {}", entry.bytes),
        ));
    } else if size > entry.bytes {
        let why = format!("{} bytes more than the {} that were written", size - entry.bytes, entry.bytes);
        report.problems.push(problem(None, Vec::new(), why));
    }
    let mut first_is_sound = false;
    // blocks that are only partly there are counted as lost above
    let readable = if size < entry.bytes { size / BLOCK as u64 } else { entry.blocks.len() as u64 };
    let jobs = [Job { file, size: entry.bytes, blocks: 0..readable }];
    let open = |_| BlockFile::open(folder, &entry.name);
    stream(buffers, &jobs, open, |(job, read)| {
        let window = match read {
            Ok(window) => window,
            Err(e) => {
                let tensors = manifest.tensors_in(file, job.blocks.start);
                let why = format!("blocks {}..{}: {e}", job.blocks.start, job.blocks.end);
                report.problems.push(problem(Some(job.blocks.start), tensors, why));
                return Ok(());
            }
        };
        for (block, bytes) in job.blocks.clone().zip(window.chunks(BLOCK)) {
            report.blocks += 1;
            report.bytes += bytes.len() as u64;
            if entry.blocks[block as usize] != Hash::of(bytes) {
                let why = "its bytes do not fit their BLAKE3".into();
                report.problems.push(problem(Some(block), manifest.tensors_in(file, block), why));
            } else if block == 0 {
                first_is_sound = true;
            }
        }
        Ok(())
    })?;
    if size == entry.bytes && first_is_sound {
        let why = header_problem(folder, manifest, file);
        report.problems.extend(why.map(|why| problem(Some(0), Vec::new(), why)));
    }
    Ok(())
}

/// A file of parity, which holds no tensors.
fn verify_parity(
    folder: &Folder,
    entry: &FileEntry,
    buffers: &Buffers,
    report: &mut CheckpointReport,
) -> Result<()> {
    let problem = |block, why| Damage { file: entry.name.clone(), block, tensors: Vec::new(), why };
    match folder.size_of(&entry.name) {
        Ok(Some(size)) if size == entry.bytes => {}
        Ok(Some(size)) => {
            let why = format!("it has {size} bytes, the manifest says {}", entry.bytes);
            report.problems.push(problem(None, why));
            return Ok(());
        }
        Ok(None) => {
            report.problems.push(problem(None, "it is missing".into()));
            return Ok(());
        }
        Err(e) => {
            report.problems.push(damage_of(&entry.name, e));
            return Ok(());
        }
    }
    let jobs = [Job { file: 0, size: entry.bytes, blocks: 0..entry.blocks.len() as u64 }];
    stream(
        buffers,
        &jobs,
        |_| BlockFile::open(folder, &entry.name),
        |(job, read)| {
            let window = match read {
                Ok(window) => window,
                Err(e) => {
                    report.problems.push(problem(Some(job.blocks.start), e.to_string()));
                    return Ok(());
                }
            };
            for (block, bytes) in job.blocks.clone().zip(window.chunks(BLOCK)) {
                report.blocks += 1;
                report.bytes += bytes.len() as u64;
                if entry.blocks.get(block as usize) != Some(&Hash::of(bytes)) {
                    report.problems.push(problem(Some(block), "its bytes do not fit their BLAKE3".into()));
                }
            }
            Ok(())
        },
    )
}

/// What the shard's own header says differently from the manifest.
fn header_problem(folder: &Folder, manifest: &Manifest, file: usize) -> Option<String> {
    use std::os::unix::fs::FileExt;
    let (shard, size) = match folder.open_file(&manifest.files[file].name, nix::fcntl::OFlag::empty()) {
        Ok(open) => open,
        Err(e) => return Some(e.to_string()),
    };
    let header = match safetensors::read_header(size, |at, out| shard.read_exact_at(out, at)) {
        Ok(header) => header,
        Err(why) => return Some(why),
    };
    let mut expected = manifest.expected_header(file);
    for e in &header.entries {
        let elements: u64 = e.shape.iter().product();
        if expected.remove(&e.name) != Some((e.dtype, elements, e.bytes.clone())) {
            return Some(format!("its header has {}, which the manifest has not or elsewhere", e.name));
        }
    }
    expected.keys().next().map(|name| format!("its header lacks {name}"))
}

/// `role/name` of the tensors with bytes in this block or after it.
fn tensors_from(manifest: &Manifest, file: usize, block: u64) -> Vec<String> {
    let start = block * BLOCK as u64;
    let after = |t: &&crate::manifest::TensorEntry| {
        t.pieces.iter().any(|p| p.file == file && p.bytes(t.dtype).end > start)
    };
    manifest.tensors.iter().filter(after).map(|t| t.label()).collect()
}
