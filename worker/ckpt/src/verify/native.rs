//! Verifies the files of a native checkpoint against the hashes in its manifest.
use super::report::{CheckpointReport, convert_to_damage};
use crate::codec::disk::{BLOCK, BlockReader, BlockRequest, Directory, DiskBufferPool, stream_windows};
use crate::codec::safetensors;
use crate::error::{CkptError, Damage, DamageReason, RemoteShard, Result};
use crate::format_constants::MANIFEST_FILE;
use crate::hash::Hash;
use crate::layout::native::{FileEntry, Manifest, RemoteShards};
use std::ops::Range;
use std::path::Path;

/// Verifies every file of the native checkpoint at `path`, except shards on other hosts. `named` is
/// the step in the name of the directory, which must equal the step in the manifest, or `None` if
/// the name has no step.
pub(super) fn verify_native(path: &Path, named: Option<u64>) -> Result<CheckpointReport> {
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
        let reason = DamageReason::SizeMismatch { expected: entry.bytes, found: size };
        report.problems.push(problem(None, tensors, reason));
    } else if size > entry.bytes {
        let reason = DamageReason::SizeMismatch { expected: entry.bytes, found: size };
        report.problems.push(problem(None, Vec::new(), reason));
    }
    // the size mismatch above already reports blocks that are only partly present
    let readable = if size < entry.bytes { size / BLOCK as u64 } else { entry.blocks.len() as u64 };
    let tensors_in_block = |block| manifest.tensors_in_block(file, block);
    let describe =
        |blocks: &Range<u64>, e: &CkptError| format!("blocks {}..{}: {e}", blocks.start, blocks.end);
    let first_block_is_valid =
        verify_blocks(directory, entry, readable, buffers, report, &tensors_in_block, &describe)?;
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
    let damage = match directory.file_size(&entry.name) {
        Ok(Some(found)) if found == entry.bytes => None,
        Ok(Some(found)) => {
            Some(Damage::for_file(&entry.name, DamageReason::SizeMismatch { expected: entry.bytes, found }))
        }
        Ok(None) => Some(Damage::for_file(&entry.name, DamageReason::FileMissing)),
        Err(e) => Some(convert_to_damage(&entry.name, e)),
    };
    if let Some(damage) = damage {
        report.problems.push(damage);
        return Ok(());
    }
    let readable = entry.blocks.len() as u64;
    verify_blocks(directory, entry, readable, buffers, report, &|_| Vec::new(), &|_, e| e.to_string())
        .map(drop)
}

/// Verifies the first `readable` blocks of a file against their hashes, and adds its problems to
/// `report`. `describe_error` makes the text of a problem from the blocks that cannot be read.
/// Returns whether the first block is valid.
fn verify_blocks(
    directory: &Directory,
    entry: &FileEntry,
    readable: u64,
    buffers: &DiskBufferPool,
    report: &mut CheckpointReport,
    tensors_in_block: &dyn Fn(u64) -> Vec<String>,
    describe_error: &dyn Fn(&Range<u64>, &CkptError) -> String,
) -> Result<bool> {
    let problem = |block, reason| {
        let (file, tensors) = (entry.name.clone(), tensors_in_block(block));
        Damage { file, block: Some(block), tensors, reason }
    };
    let mut first_block_is_valid = false;
    let jobs = [BlockRequest { file: 0, size: entry.bytes, blocks: 0..readable }];
    let open = |_| BlockReader::open(directory, &entry.name);
    stream_windows(buffers, &jobs, open, |(job, read)| {
        let window = match read {
            Ok(window) => window,
            Err(e) => {
                let detail = describe_error(&job.blocks, e);
                report.problems.push(problem(job.blocks.start, detail.into()));
                return Ok(());
            }
        };
        for (block, bytes) in job.blocks.clone().zip(window.chunks(BLOCK)) {
            report.blocks += 1;
            report.bytes += bytes.len() as u64;
            if entry.blocks.get(block as usize) != Some(&Hash::digest(bytes)) {
                report.problems.push(problem(block, DamageReason::HashMismatch));
            } else if block == 0 {
                first_block_is_valid = true;
            }
        }
        Ok(())
    })?;
    Ok(first_block_is_valid)
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
    let after = |t: &&crate::layout::native::TensorEntry| {
        t.pieces.iter().any(|p| p.file == file && p.byte_range(t.dtype).end > start)
    };
    manifest.tensors.iter().filter(after).map(|t| t.label()).collect()
}
