//! Checkpoints that other programs wrote, read where they lie.
pub(crate) mod store;

use self::store::{Part, Store, Wanted};
use crate::catalog::{Role, TensorInfo, TextFile, Tie};
use crate::checkpoint::Request;
use crate::cut;
use crate::disk::Folder;
use crate::dtype::Dtype;
use crate::error::{CkptError, Damage, Result};
use crate::source::Source;
use crate::verify::CheckpointReport;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Largest text file that is taken along, bytes.
const TEXT_MAX: u64 = 64 << 20;
/// How one rank's missing file is called among what is missing.
pub(crate) const RANDOM_STATE_OF: &str = "random state of rank";
/// Elements looked at in one go.
const VALUES_AT_A_TIME: u64 = 1 << 20;
/// Files beside a model that belong into a Hugging Face folder.
const TEXTS: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// What a checkpoint of another program says about itself, and what was found out about it.
#[derive(Clone, Debug, Serialize)]
pub struct ForeignFacts {
    /// The format, for example `deepspeed`.
    pub kind: &'static str,
    /// The program that wrote it, with its version where known.
    pub writer: String,
    /// The folder that holds the state.
    pub tag: String,
    /// Optimizer steps done.
    pub step: Option<u64>,
    /// Ranks that wrote it.
    pub world: u32,
    /// ZeRO stage.
    pub stage: u8,
    /// Hyper-parameters per optimizer group.
    pub groups: Value,
    /// State of the learning rate scheduler.
    pub scheduler: Value,
    pub ties: Vec<Tie>,
    /// Weights that are not trained.
    pub frozen: Vec<String>,
    /// Weights that are named but nowhere stored.
    pub lost: Vec<String>,
    /// Files with states of random generators.
    pub rng_files: Vec<String>,
    /// What contradicts itself or deserves to be known.
    pub notices: Vec<String>,
    /// What a full training state has and this checkpoint has not.
    pub missing: Vec<String>,
}

/// One tensor and where its elements are.
pub(crate) struct Entry {
    pub(crate) info: TensorInfo,
    /// Sorted by start; together they are the tensor.
    pub(crate) parts: Vec<Part>,
}

/// A checkpoint of another program, open for reading.
pub struct Foreign {
    path: PathBuf,
    facts: ForeignFacts,
    store: Store,
    entries: Vec<Entry>,
    index: HashMap<(Role, String), usize>,
    config: Option<Map<String, Value>>,
    texts: Vec<TextFile>,
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Foreign({}, {})", self.facts.kind, self.path.display())
    }
}

impl Foreign {
    /// Checks that the entries are whole; `beside` is the folder that may hold `config.json` and a tokenizer.
    pub(crate) fn new(
        path: &Path,
        beside: &Path,
        mut facts: ForeignFacts,
        store: Store,
        mut entries: Vec<Entry>,
    ) -> Result<Foreign> {
        entries.sort_by_key(|e| e.info.role);
        let mut index = HashMap::new();
        for (i, entry) in entries.iter().enumerate() {
            let label = format!("{}/{}", entry.info.role, entry.info.name);
            let wrong = |why: String| CkptError::damaged(path, label.as_str(), why);
            crate::catalog::check_name(&entry.info.name).map_err(wrong)?;
            let total = crate::catalog::elements(&entry.info.shape)
                .ok_or_else(|| wrong(format!("it has the impossible shape {:?}", entry.info.shape)))?;
            if let Some(flaw) = cut::flaw(total, entry.parts.iter().map(Part::elements)) {
                return Err(wrong(flaw.to_string()));
            }
            if index.insert((entry.info.role, entry.info.name.clone()), i).is_some() {
                return Err(wrong("it is there twice".into()));
            }
        }
        let beside = Folder::open(beside)?;
        let config = config(&beside)?;
        let texts = texts(&beside)?;
        if config.is_none() {
            facts.missing.push("config.json".into());
        }
        if !texts.iter().any(|t| t.name != TEXTS[0]) {
            facts.missing.push("tokenizer".into());
        }
        Ok(Foreign { path: path.to_owned(), facts, store, entries, index, config, texts })
    }

    /// What is known about it.
    pub fn facts(&self) -> &ForeignFacts {
        &self.facts
    }

    /// Name and size of every file that holds tensors.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.store.files.iter().map(|f| (f.name.as_str(), f.size))
    }

    /// `role/name` of the tensors with such a part.
    fn holders(&self, inside: &dyn Fn(&Part) -> bool) -> Vec<String> {
        let held = self.entries.iter().filter(|e| e.parts.iter().any(inside));
        held.map(|e| format!("{}/{}", e.info.role, e.info.name)).collect()
    }

    /// Reads every byte: what is damaged, and notes on values that are no finite numbers.
    pub(crate) fn verify(&self) -> Result<(CheckpointReport, Vec<String>)> {
        let (bytes, blocks, mut problems) = self.store.check(|inside| self.holders(inside))?;
        let lost = |name: &String| Damage {
            file: self.facts.tag.clone(),
            block: None,
            tensors: vec![format!("{}/{name}", Role::Weight)],
            why: "nothing of it is stored".into(),
        };
        problems.extend(self.facts.lost.iter().map(lost));
        let mut notes = self.facts.notices.clone();
        // some ranks have one, so all should
        let alone = self.facts.missing.iter().filter(|m| m.starts_with(RANDOM_STATE_OF));
        notes.extend(alone.map(|m| format!("the {m} is missing")));
        if problems.is_empty() {
            notes.extend(self.not_finite()?);
        }
        let report =
            CheckpointReport { path: self.path.clone(), step: self.facts.step, bytes, blocks, problems };
        Ok((report, notes))
    }

    /// A line for each tensor with values that are no finite numbers.
    fn not_finite(&self) -> Result<Vec<String>> {
        let (mut lines, mut buffer) = (Vec::new(), Vec::new());
        for info in self.entries.iter().map(|e| &e.info).filter(|i| is_float(i.dtype)) {
            let (mut nans, mut infinite, mut at) = (0u64, 0u64, 0);
            while at < info.elements() {
                buffer.resize((info.elements() - at).min(VALUES_AT_A_TIME) as usize, 0.0);
                let (name, role, out) = (info.name.as_str(), info.role, buffer.as_mut_slice());
                self.read_many(&mut [Request { name, role, start_element: at, out }])?;
                nans += buffer.iter().filter(|x| x.is_nan()).count() as u64;
                infinite += buffer.iter().filter(|x| x.is_infinite()).count() as u64;
                at += buffer.len() as u64;
            }
            if nans + infinite > 0 {
                let label = format!("{}/{}", info.role, info.name);
                lines.push(format!(
                    "{label} has {nans} NaN and {infinite} infinite of {} values",
                    info.elements()
                ));
            }
        }
        Ok(lines)
    }

    fn entry(&self, name: &str, role: Role) -> Result<&Entry> {
        self.index.get(&(role, name.to_owned())).map(|&i| &self.entries[i]).ok_or_else(|| {
            CkptError::Mismatch {
                path: self.path.clone(),
                what: "tensors".into(),
                expected: format!("{role}/{name}"),
                found: "no such tensor".into(),
            }
        })
    }

    fn resolve<'a>(&'a self, request: &'a mut Request<'_>, wanted: &mut Vec<Wanted<'a>>) -> Result<()> {
        let entry = self.entry(request.name, request.role)?;
        let start = request.start_element;
        let range = start..start.saturating_add(request.out.len() as u64);
        if range.end > entry.info.elements() {
            return Err(CkptError::Mismatch {
                path: self.path.clone(),
                what: format!("size of {}/{}", request.role, request.name),
                expected: format!("at least {} elements", range.end),
                found: format!("{} elements", entry.info.elements()),
            });
        }
        if !is_float(entry.info.dtype) {
            let what = format!(
                "{}/{} is {}, which has no exact place in F32",
                request.role, request.name, entry.info.dtype
            );
            return Err(CkptError::Unsupported { path: self.path.clone(), what });
        }
        let mut rest: &mut [f32] = request.out;
        for (i, range) in cut::cover(&entry.parts, Part::elements, range) {
            let (out, tail) = std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
            rest = tail;
            wanted.push(Wanted { part: &entry.parts[i], dtype: entry.info.dtype, range, out });
        }
        Ok(())
    }
}

impl Source for Foreign {
    fn path(&self) -> &Path {
        &self.path
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        self.entries.iter().map(|e| e.info.clone()).collect()
    }

    fn read_many(&self, requests: &mut [Request<'_>]) -> Result<()> {
        let mut wanted = Vec::new();
        for request in requests {
            self.resolve(request, &mut wanted)?;
        }
        self.store.read(wanted, |inside| self.holders(inside))
    }

    fn step(&self) -> Option<u64> {
        self.facts.step
    }

    fn tokens(&self) -> Option<u64> {
        None
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        self.config.as_ref()
    }

    fn texts(&self) -> &[TextFile] {
        &self.texts
    }

    fn require_weights(&self) -> Result<()> {
        match self.facts.lost.as_slice() {
            [] => Ok(()),
            [first, more @ ..] => {
                let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
                Err(CkptError::Missing { path: self.path.clone(), what: format!("the weight {first}{more}") })
            }
        }
    }
}

/// What is read as F32 without loss.
fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

fn config(folder: &Folder) -> Result<Option<Map<String, Value>>> {
    match folder.size_of("config.json")? {
        None => Ok(None),
        Some(_) => {
            let text = folder.read("config.json", TEXT_MAX)?;
            match serde_json::from_slice(&text) {
                Ok(Value::Object(map)) => Ok(Some(map)),
                Ok(_) => Err(CkptError::damaged(folder.path(), "config.json", "it is no JSON object")),
                Err(e) => Err(CkptError::damaged(folder.path(), "config.json", e.to_string())),
            }
        }
    }
}

fn texts(folder: &Folder) -> Result<Vec<TextFile>> {
    let mut texts = Vec::new();
    for name in TEXTS {
        if folder.size_of(name)?.is_some() {
            let text = String::from_utf8(folder.read(name, TEXT_MAX)?)
                .map_err(|_| CkptError::damaged(folder.path(), name, "it is no UTF-8 text"))?;
            texts.push(TextFile { name: name.into(), text });
        }
    }
    Ok(texts)
}
