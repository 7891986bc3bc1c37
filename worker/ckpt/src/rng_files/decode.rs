//! Reads one rank's RNG state file, which is untrusted input.
use super::streams::{
    CPU_BYTES, CpuState, CudaState, CudaStates, MersenneTwister, NumpyModule, NumpyState, PythonState,
    RankStates, RngFormat, RngStateError, WORDS,
};
use crate::disk::Directory;
use crate::dtype::Dtype;
use crate::error::{ReadFailure, Result};
use crate::formats::torch_file::{TENSORS, TorchFile};
use crate::pickle::View;
use nix::fcntl::OFlag;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Largest file that is read, bytes. A usual file has 14 kB and 16 bytes per GPU.
const FILE_MAX: u64 = 16 << 20;
/// Most GPUs of a rank.
const DEVICES_MAX: usize = 1024;
/// Globals that the pickles may name, in addition to those of tensors.
const GLOBALS: &[&[&str]] = &[
    TENSORS,
    &[
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "_codecs.encode",
    ],
];

type DecodeResult<T> = std::result::Result<T, RngStateError>;

/// Reads and validates the file `name`; the format follows from the keys of its dict.
pub(super) fn read_rank_file(directory: &Directory, name: &str) -> Result<(RngFormat, RankStates)> {
    let damaged = |error: RngStateError| error.at(directory.path(), name);
    match directory.size_of(name)? {
        Some(bytes) if bytes > FILE_MAX => {
            return Err(damaged(RngStateError::FileTooLarge { bytes, limit: FILE_MAX }));
        }
        _ => {}
    }
    let file = TorchFile::open(directory, name, GLOBALS)?;
    let (reader, _) = directory.open_file(name, OFlag::empty())?;
    let root = file.value();
    let keys: Vec<&str> = match root.pairs() {
        Some(pairs) => pairs.filter_map(|(key, _)| key.str()).collect(),
        None => return Err(damaged(RngStateError::NotADict)),
    };
    let (format, [python, numpy, cpu, cuda]) = match keys.contains(&"random_state") {
        true => (
            RngFormat::Accelerate,
            ["random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed"],
        ),
        false => (RngFormat::Trainer, ["python", "numpy", "cpu", "cuda"]),
    };
    let known = [python, numpy, cpu, cuda, "step"];
    if let Some(other) = keys.iter().find(|k| !known.contains(k)) {
        let key: String = other.chars().filter(|c| !c.is_control()).take(60).collect();
        return Err(damaged(RngStateError::UnknownStream { key }));
    }
    let bytes = |value: View<'_>| tensor_bytes(&reader, &file, value);
    let need = |key: &'static str| root.get(key).ok_or(RngStateError::MissingStream { key });
    let states = || -> DecodeResult<RankStates> {
        let (numpy_names, numpy) = numpy_state(need(numpy)?)?;
        Ok(RankStates {
            python: python_state(need(python)?)?,
            numpy,
            numpy_module: numpy_names,
            cpu: CpuState::new(&bytes(need(cpu)?)?)?,
            cuda: root.get(cuda).filter(|v| !v.is_none()).map(|v| cuda_states(v, bytes)).transpose()?,
            step: root.get("step").and_then(View::int),
        })
    };
    Ok((format, states().map_err(damaged)?))
}

fn python_state(value: View<'_>) -> DecodeResult<PythonState> {
    let unusual = || RngStateError::UnknownLayout { generator: "Python's random" };
    let items = value.items().ok_or_else(unusual)?;
    let (Some(version), Some(state), Some(gauss)) = (items.get(0), items.get(1), items.get(2)) else {
        return Err(unusual());
    };
    if version.int() != Some(3) {
        return Err(RngStateError::PythonVersion { version: version.int() });
    }
    let numbers = state.items().and_then(|i| i.counts()).ok_or_else(unusual)?;
    let (words, position) = match numbers.split_last() {
        Some((position, words)) if words.len() == WORDS => (words, *position),
        _ => return Err(unusual()),
    };
    let mut twister_words = Box::new([0u32; WORDS]);
    for (slot, word) in twister_words.iter_mut().zip(words) {
        *slot = u32::try_from(*word).map_err(|_| unusual())?;
    }
    let gauss_next = match (gauss.is_none(), gauss.float()) {
        (true, _) => None,
        (false, Some(g)) => Some(g),
        (false, None) => return Err(unusual()),
    };
    Ok(PythonState {
        twister: MersenneTwister { words: twister_words, position: twister_position(position)? },
        gauss_next,
    })
}

fn twister_position(position: u64) -> DecodeResult<u32> {
    match u32::try_from(position) {
        Ok(p) if p as usize <= WORDS => Ok(p),
        _ => Err(RngStateError::TwisterPosition { position }),
    }
}

fn numpy_state(value: View<'_>) -> DecodeResult<(NumpyModule, NumpyState)> {
    let unusual = || RngStateError::UnknownLayout { generator: "NumPy" };
    let items = value.items().ok_or_else(unusual)?;
    let item = |i: usize| items.get(i).ok_or_else(unusual);
    if item(0)?.str() != Some("MT19937") {
        return Err(RngStateError::NumpyGenerator);
    }
    let (names, words) = twister_words(item(1)?).ok_or_else(unusual)?;
    let position = twister_position(item(2)?.count().ok_or_else(unusual)?)?;
    let has_gauss = match item(3)?.int() {
        Some(0) => false,
        Some(1) => true,
        _ => return Err(unusual()),
    };
    let cached_gaussian = item(4)?.float().ok_or_else(unusual)?;
    Ok((names, NumpyState { twister: MersenneTwister { words, position }, has_gauss, cached_gaussian }))
}

/// Decodes a NumPy array of 624 little-endian u32. Pickle protocol 2 stores its bytes as Latin-1
/// text.
fn twister_words(value: View<'_>) -> Option<(NumpyModule, Box<[u32; WORDS]>)> {
    let (function, _, state) = value.object()?;
    let names = match function {
        "numpy._core.multiarray._reconstruct" => NumpyModule::PrivateCore,
        "numpy.core.multiarray._reconstruct" => NumpyModule::Core,
        _ => return None,
    };
    let state = state.items()?;
    let (dtype, args, order) = state.get(2)?.object()?;
    let shape = state.get(1)?.items()?.counts()?;
    let of_u32 = dtype == "numpy.dtype"
        && args.items()?.get(0)?.str() == Some("u4")
        && order.items()?.get(1)?.str() == Some("<");
    let (encode, text, _) = state.get(4)?.object()?;
    if shape != [WORDS as u64] || !of_u32 || encode != "_codecs.encode" {
        return None;
    }
    let bytes: Option<Vec<u8>> =
        text.items()?.get(0)?.str()?.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect();
    let bytes = bytes.filter(|b| b.len() == 4 * WORDS)?;
    let mut words = Box::new([0u32; WORDS]);
    for (word, b) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*b);
    }
    Some((names, words))
}

fn cuda_states(
    value: View<'_>,
    bytes: impl Fn(View<'_>) -> DecodeResult<Vec<u8>>,
) -> DecodeResult<CudaStates> {
    match value.items() {
        None => CudaState::new(&bytes(value)?).map(CudaStates::One),
        Some(list) if list.iter().take(DEVICES_MAX + 1).count() > DEVICES_MAX => {
            Err(RngStateError::TooManyGpus { limit: DEVICES_MAX })
        }
        Some(list) => {
            let devices =
                list.iter().map(|v| CudaState::new(&bytes(v)?)).collect::<DecodeResult<Vec<_>>>()?;
            Ok(CudaStates::All(devices))
        }
    }
}

/// The bytes of a small one-dimensional tensor of u8, checked against the CRC-32 of its zip member.
fn tensor_bytes(reader: &File, file: &TorchFile, value: View<'_>) -> DecodeResult<Vec<u8>> {
    let unusual = || RngStateError::UnknownLayout { generator: "torch" };
    let view = file.tensor(value)?.ok_or_else(unusual)?;
    let len = view.elements();
    if view.dtype != Dtype::U8 || !view.is_contiguous() || view.shape.len() != 1 || len > CPU_BYTES as u64 {
        return Err(unusual());
    }
    let member = file.members.get(view.member).ok_or_else(unusual)?;
    let stored = member.data.end - member.data.start;
    if stored > FILE_MAX {
        return Err(unusual());
    }
    let mut bytes = vec![0u8; stored as usize];
    reader.read_exact_at(&mut bytes, member.data.start).map_err(ReadFailure::from)?;
    if member.crc.is_some_and(|crc| crc != crc32fast::hash(&bytes)) {
        return Err(RngStateError::Crc { member: member.name.clone() });
    }
    let range = view.offset as usize..(view.offset + len) as usize;
    bytes.get(range).map(<[u8]>::to_vec).ok_or_else(unusual)
}
