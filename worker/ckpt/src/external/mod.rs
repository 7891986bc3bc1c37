//! Checkpoints that other programs wrote, read where they lie.
mod beside;
mod check;
mod detect;
pub(crate) mod draft;
mod facts;
mod listed;
mod part;
pub(crate) mod store;
mod sums;
pub(crate) mod sweep;
pub(crate) mod values;

pub(crate) use self::beside::add as add_beside;
pub(crate) use self::detect::{open, open_trained};
pub use self::facts::ForeignFacts;

use self::store::{Part, Store, Wanted};
use crate::catalog::{Role, TensorInfo, TextFile};
use crate::cut;
use crate::disk::Folder;
use crate::error::{CkptError, Damage, Result};
use crate::passthrough::Extras;
use crate::source::{Request, Source};
use crate::state::TrainingState;
use crate::verify::CheckpointReport;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Largest text file that is taken along, bytes.
const TEXT_MAX: u64 = 64 << 20;
/// How one rank's missing file is called among what is missing.
pub(crate) const RANDOM_STATE_OF: &str = "random state of rank";
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
    /// What goes along when it is written anew.
    extras: Extras,
    /// It is a single file: others beside it aren't part of it.
    alone: bool,
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
        let of_role = |role: Role| entries.iter().filter(move |e| e.info.role == role);
        facts.buffers = of_role(Role::Buffer).map(|e| e.info.name.clone()).collect();
        facts.root = beside.to_owned();
        let beside = Folder::open(beside)?;
        let config = config(&beside)?;
        let texts = texts(&beside)?;
        if config.is_none() {
            facts.missing.push("config.json".into());
        }
        if !texts.iter().any(|t| t.name != TEXTS[0]) {
            facts.missing.push("tokenizer".into());
        }
        Ok(Foreign {
            path: path.to_owned(),
            facts,
            store,
            entries,
            index,
            config,
            texts,
            extras: Extras::default(),
            alone: false,
        })
    }

    /// The same with what goes along when it is written anew.
    pub(crate) fn with_extras(mut self, extras: Extras) -> Foreign {
        self.extras = extras;
        self
    }

    /// What is known about it.
    pub fn facts(&self) -> &ForeignFacts {
        &self.facts
    }

    /// The same, being one file and nothing that lies beside it.
    pub(crate) fn single(mut self) -> Foreign {
        self.alone = true;
        self
    }

    /// Adds warnings.
    pub(crate) fn warn(&mut self, lines: Vec<String>) {
        self.facts.warnings.extend(lines);
    }

    /// Puts notices before the others.
    fn say_first(&mut self, mut lines: Vec<String>) {
        lines.append(&mut self.facts.notices);
        self.facts.notices = lines;
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

    /// Reads every byte of every file, also of those that hold no tensors: what is damaged, and what is to be warned of.
    pub(crate) fn verify(&self) -> Result<(CheckpointReport, Vec<String>)> {
        let (mut bytes, mut blocks, mut problems) = self.store.check(|inside| self.holders(inside))?;
        let lost = |name: &String| Damage {
            file: self.facts.tag.clone(),
            block: None,
            tensors: vec![format!("{}/{name}", Role::Weight)],
            why: "nothing of it is stored".into(),
        };
        problems.extend(self.facts.lost.iter().map(lost));
        let file = || self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let incomplete =
            |why: &String| Damage { file: file(), block: None, tensors: Vec::new(), why: why.clone() };
        problems.extend(self.facts.incomplete.iter().map(incomplete));
        for other in self.others()? {
            bytes += other.bytes;
            blocks += other.members;
            problems.extend(other.problems);
        }
        let mut warnings = self.facts.warnings.clone();
        // some ranks have one, so all should
        let alone = self.facts.missing.iter().filter(|m| m.starts_with(RANDOM_STATE_OF));
        warnings.extend(alone.map(|m| format!("the {m} is missing")));
        let report = CheckpointReport {
            path: self.path.clone(),
            step: self.facts.step,
            bytes,
            blocks,
            problems,
            ..Default::default()
        };
        Ok((report, warnings))
    }

    /// The files that hold nothing that was read: random states, schedulers, what programs added.
    fn others(&self) -> Result<Vec<sweep::Swept>> {
        if self.alone {
            return Ok(Vec::new());
        }
        let tag = self.store.files.first().map(|f| f.folder().path().to_owned());
        let mut paths = vec![(self.facts.root.clone(), 0)];
        if let Some(tag) = tag.filter(|tag| *tag != self.facts.root) {
            paths.push((tag, 3));
        }
        let mut all = Vec::new();
        for (path, depth) in paths {
            let own = |f: &store::StoredFile| (f.folder().path() == path).then(|| f.name.clone());
            let known = self.store.files.iter().filter_map(own).collect();
            all.push(sweep::sweep(&path, &known, depth)?);
        }
        Ok(all)
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
        if !entry.info.dtype.is_float() {
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

    fn read_unchecked(&self, requests: &mut [Request<'_>]) -> Result<()> {
        let mut wanted = Vec::new();
        for request in requests {
            self.resolve(request, &mut wanted)?;
        }
        self.store.read_unchecked(wanted, |inside| self.holders(inside))
    }

    fn settle(&self, all: bool) -> Result<()> {
        self.store.settle(all, |inside| self.holders(inside))
    }

    fn read_raw(&self, name: &str, role: Role, start_element: u64, out: &mut [u8]) -> Result<()> {
        let entry = self.entry(name, role)?;
        let size = entry.info.dtype.size();
        let end = start_element.saturating_add(out.len() as u64 / size);
        let mut rest = out;
        for (i, range) in cut::cover(&entry.parts, Part::elements, start_element..end) {
            let bytes = ((range.end - range.start) * size) as usize;
            let (now, later) = std::mem::take(&mut rest).split_at_mut(bytes);
            rest = later;
            let holders = |inside: &dyn Fn(&Part) -> bool| self.holders(inside);
            self.store.read_raw(&entry.parts[i], entry.info.dtype, range, now, holders)?;
        }
        match rest.is_empty() {
            true => Ok(()),
            false => Err(CkptError::invalid(format!("{role}/{name} is shorter than what is asked of it"))),
        }
    }

    fn extras(&self) -> Result<Extras> {
        Ok(self.extras.clone())
    }

    fn step(&self) -> Option<u64> {
        self.facts.step
    }

    fn state(&self) -> TrainingState {
        self.facts.state()
    }

    fn is_weights_alone(&self) -> bool {
        let states = self.entries.iter().any(|e| e.info.role.is_optimizer_state());
        !states && !self.facts.is_training_state()
    }

    fn unread(&self) -> Option<&str> {
        self.facts.unread()
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
