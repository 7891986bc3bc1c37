//! Reading one rank's file.
use super::streams::{
    CPU_BYTES, CpuState, CudaState, CudaStates, NumpyNames, NumpyState, PythonState, RankStates, Twister,
    WORDS, Writer,
};
use crate::disk::Folder;
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::formats::torch_file::{TENSORS, TorchFile, crc_flaw};
use crate::pickle::View;
use nix::fcntl::OFlag;
use std::os::unix::fs::FileExt;

/// Largest file that is read, bytes: one has 14 kB and 16 bytes per GPU.
const FILE_MAX: u64 = 16 << 20;
/// Most GPUs of a rank.
const DEVICES_MAX: usize = 1024;
/// Globals of the files beside those of tensors.
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

/// `Err` is one line that says what is wrong with the file.
type Said<T> = std::result::Result<T, String>;

/// Reads `name`, and says which program's it is.
pub(super) fn read(folder: &Folder, name: &str) -> Result<(Writer, RankStates)> {
    let damaged = |why: String| CkptError::damaged(folder.path(), name, why);
    match folder.size_of(name)? {
        Some(size) if size > FILE_MAX => {
            return Err(damaged(format!("it has {size} bytes, more than the {FILE_MAX} that are allowed")));
        }
        _ => {}
    }
    let file = TorchFile::open(folder, name, GLOBALS)?;
    let root = file.value();
    let keys: Vec<&str> = match root.pairs() {
        Some(pairs) => pairs.filter_map(|(key, _)| key.str()).collect(),
        None => return Err(damaged("it is no dict of random states".into())),
    };
    let (writer, [python, numpy, cpu, cuda]) = match keys.contains(&"random_state") {
        true => (
            Writer::Accelerate,
            ["random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed"],
        ),
        false => (Writer::Trainer, ["python", "numpy", "cpu", "cuda"]),
    };
    let known = [python, numpy, cpu, cuda, "step"];
    if let Some(other) = keys.iter().find(|k| !known.contains(k)) {
        let shown: String = other.chars().filter(|c| !c.is_control()).take(60).collect();
        return Err(damaged(format!("it holds {shown:?}, a stream that this version doesn't know")));
    }
    let bytes = |value: View<'_>| tensor_bytes(folder, name, &file, value);
    let need = |key: &str| root.get(key).ok_or_else(|| format!("it has no {key}"));
    let states = || -> Said<RankStates> {
        let (numpy_names, numpy) = numpy_state(need(numpy)?)?;
        Ok(RankStates {
            python: python_state(need(python)?)?,
            numpy,
            numpy_names,
            cpu: CpuState::new(&bytes(need(cpu)?)?)?,
            cuda: root.get(cuda).filter(|v| !v.is_none()).map(|v| cuda_states(v, bytes)).transpose()?,
            step: root.get("step").and_then(View::int),
        })
    };
    Ok((writer, states().map_err(damaged)?))
}

fn python_state(value: View<'_>) -> Said<PythonState> {
    let unusual = || "its Python state is in an unknown layout".to_owned();
    let items = value.items().ok_or_else(unusual)?;
    let (Some(version), Some(state), Some(gauss)) = (items.get(0), items.get(1), items.get(2)) else {
        return Err(unusual());
    };
    if version.int() != Some(3) {
        return Err("its Python state isn't of version 3".into());
    }
    let numbers = state.items().and_then(|i| i.counts()).ok_or_else(unusual)?;
    let (words, position) = match numbers.split_last() {
        Some((position, words)) if words.len() == WORDS => (words, *position),
        _ => return Err(unusual()),
    };
    let mut kept = Box::new([0u32; WORDS]);
    for (slot, word) in kept.iter_mut().zip(words) {
        *slot = u32::try_from(*word).map_err(|_| unusual())?;
    }
    let gauss_next = match (gauss.is_none(), gauss.float()) {
        (true, _) => None,
        (false, Some(g)) => Some(g),
        (false, None) => return Err(unusual()),
    };
    Ok(PythonState { twister: Twister { words: kept, position: place(position)? }, gauss_next })
}

fn place(position: u64) -> Said<u32> {
    match u32::try_from(position) {
        Ok(p) if p as usize <= WORDS => Ok(p),
        _ => Err(format!("a generator of {WORDS} words stands at word {position}")),
    }
}

fn numpy_state(value: View<'_>) -> Said<(NumpyNames, NumpyState)> {
    let unusual = || "its numpy state is in an unknown layout".to_owned();
    let items = value.items().ok_or_else(unusual)?;
    let item = |i: usize| items.get(i).ok_or_else(unusual);
    if item(0)?.str() != Some("MT19937") {
        return Err("its numpy state is of another generator than MT19937".into());
    }
    let (names, words) = array(item(1)?).ok_or_else(unusual)?;
    let position = place(item(2)?.count().ok_or_else(unusual)?)?;
    let has_gauss = match item(3)?.int() {
        Some(0) => false,
        Some(1) => true,
        _ => return Err(unusual()),
    };
    let cached_gaussian = item(4)?.float().ok_or_else(unusual)?;
    Ok((names, NumpyState { twister: Twister { words, position }, has_gauss, cached_gaussian }))
}

/// A numpy array of 624 little-endian u32, as protocol 2 writes it: its bytes are text of latin-1.
fn array(value: View<'_>) -> Option<(NumpyNames, Box<[u32; WORDS]>)> {
    let (function, _, state) = value.object()?;
    let names = match function {
        "numpy._core.multiarray._reconstruct" => NumpyNames::PrivateCore,
        "numpy.core.multiarray._reconstruct" => NumpyNames::Core,
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

fn cuda_states(value: View<'_>, bytes: impl Fn(View<'_>) -> Said<Vec<u8>>) -> Said<CudaStates> {
    match value.items() {
        None => CudaState::new(&bytes(value)?).map(CudaStates::One),
        Some(list) if list.iter().take(DEVICES_MAX + 1).count() > DEVICES_MAX => {
            Err(format!("it holds states of more than {DEVICES_MAX} GPUs"))
        }
        Some(list) => {
            let devices = list.iter().map(|v| CudaState::new(&bytes(v)?)).collect::<Said<Vec<_>>>()?;
            Ok(CudaStates::All(devices))
        }
    }
}

/// The bytes of a small tensor of u8.
fn tensor_bytes(folder: &Folder, name: &str, file: &TorchFile, value: View<'_>) -> Said<Vec<u8>> {
    let unusual = || "a state in it is no tensor of bytes".to_owned();
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
    let (reader, _) = folder.open_file(name, OFlag::empty()).map_err(|e| e.to_string())?;
    reader.read_exact_at(&mut bytes, member.data.start).map_err(|e| e.to_string())?;
    if member.crc.is_some_and(|crc| crc != crc32fast::hash(&bytes)) {
        return Err(crc_flaw(&member.name));
    }
    let range = view.offset as usize..(view.offset + len) as usize;
    bytes.get(range).map(<[u8]>::to_vec).ok_or_else(unusual)
}
