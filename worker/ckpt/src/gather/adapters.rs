//! What is gathered of a checkpoint with low-rank adapters: a folder as PEFT writes it, or the model with its adapters merged.
use crate::catalog::{Role, TensorInfo, TextFile};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::peft::{ADAPTER_CONFIG, AdapterConfig, PREFIX, STEM, adapter_of, is_adapter, matrix_of};
use crate::source::{Request, Source};
use crate::state::TrainingState;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

/// A checkpoint seen in another way.
pub(super) struct Seen<'a> {
    pub(super) source: Box<dyn Source + 'a>,
    /// Name of the weight files, without their ending.
    pub(super) stem: &'static str,
}

/// How a checkpoint with adapters is gathered; `None`: it has none.
pub(super) fn seen(checkpoint: &dyn Source, merge: bool) -> Result<Option<Seen<'_>>> {
    let wrong = |why: String| CkptError::damaged(checkpoint.path(), ADAPTER_CONFIG, why);
    let Some(said) = checkpoint.adapter() else {
        return match merge {
            true => Err(CkptError::invalid(format!(
                "{} has no low-rank adapters to merge; gather it without --merge-lora",
                checkpoint.path().display()
            ))),
            false => Ok(None),
        };
    };
    let map = said.as_object().ok_or_else(|| wrong("it is no JSON object".into()))?;
    let config = AdapterConfig::parse(map).map_err(wrong)?;
    Ok(Some(match merge {
        true => Seen { source: Box::new(Merged::new(checkpoint, &config)?), stem: super::MODEL },
        false => Seen { source: Box::new(Alone::new(checkpoint, said)?), stem: STEM },
    }))
}

/// The adapters alone, by PEFT's names.
struct Alone<'a> {
    inner: &'a dyn Source,
    texts: Vec<TextFile>,
}

impl<'a> Alone<'a> {
    fn new(inner: &'a dyn Source, said: &Value) -> Result<Self> {
        // of the model's own files a tokenizer may be another than the model's
        let of_model = |t: &&TextFile| t.name != super::GENERATION;
        let mut texts = vec![TextFile { name: ADAPTER_CONFIG.into(), text: super::pretty(said)? }];
        texts.extend(inner.texts().iter().filter(of_model).cloned());
        Ok(Alone { inner, texts })
    }
}

impl Source for Alone<'_> {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        let adapters =
            self.inner.tensors().into_iter().filter(|t| t.role == Role::Weight && is_adapter(&t.name));
        adapters.map(|t| TensorInfo { name: format!("{PREFIX}{}", t.name), ..t }).collect()
    }

    fn read_many(&self, requests: &mut [Request<'_>]) -> Result<()> {
        let mut renamed: Vec<Request<'_>> = requests
            .iter_mut()
            .map(|r| Request {
                name: r.name.strip_prefix(PREFIX).unwrap_or(r.name),
                role: r.role,
                start_element: r.start_element,
                out: &mut *r.out,
            })
            .collect();
        self.inner.read_many(&mut renamed)
    }

    fn weights_dtype(&self) -> Dtype {
        self.inner.weights_dtype()
    }

    fn step(&self) -> Option<u64> {
        self.inner.step()
    }

    fn state(&self) -> TrainingState {
        self.inner.state()
    }

    fn tokens(&self) -> Option<u64> {
        self.inner.tokens()
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        None
    }

    fn texts(&self) -> &[TextFile] {
        &self.texts
    }
}

/// The model, to whose matrices the adapters are added as they are read.
struct Merged<'a> {
    inner: &'a dyn Source,
    /// By the name of the matrix.
    adapters: HashMap<String, Adapter>,
    scale: f32,
    /// Matrices are `[in, out]`.
    transposed: bool,
}

/// The adapter of one matrix.
struct Adapter {
    rank: usize,
    inp: usize,
    out: usize,
}

impl<'a> Merged<'a> {
    /// Refuses adapters that don't fit their matrices.
    fn new(inner: &'a dyn Source, config: &AdapterConfig) -> Result<Self> {
        let tensors = inner.tensors();
        let weights = tensors.iter().filter(|t| t.role == Role::Weight);
        let shapes: HashMap<&str, &[u64]> = weights.map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
        let mut adapters = HashMap::new();
        for matrix in shapes.keys().filter_map(|name| matrix_of(name)) {
            let [a, b] = adapter_of(&matrix).unwrap_or_default();
            let wrong = || {
                CkptError::damaged(
                    inner.path(),
                    ADAPTER_CONFIG,
                    format!("the adapter of {matrix} doesn't fit it"),
                )
            };
            let shape = |name: &str| match shapes.get(name) {
                Some([x, y]) => Ok([*x as usize, *y as usize]),
                _ => Err(wrong()),
            };
            let ([rank, inp], [out, b_rank]) = (shape(&a)?, shape(&b)?);
            let expected = if config.fan_in_fan_out { [inp, out] } else { [out, inp] };
            if rank != config.rank as usize || b_rank != rank || shape(&matrix)? != expected {
                return Err(wrong());
            }
            adapters.insert(matrix, Adapter { rank, inp, out });
        }
        let (scale, transposed) = (config.scale() as f32, config.fan_in_fan_out);
        Ok(Merged { inner, adapters, scale, transposed })
    }

    /// Adds its adapter to some elements of a matrix.
    fn merge(&self, name: &str, ad: &Adapter, start: u64, values: &mut [f32]) -> Result<()> {
        let [a_name, b_name] = adapter_of(name).unwrap_or_default();
        let (mut a, mut b) = (vec![0f32; ad.rank * ad.inp], vec![0f32; ad.out * ad.rank]);
        let of = |name, out| Request { name, role: Role::Weight, start_element: 0, out };
        self.inner.read_many(&mut [of(&a_name, &mut a), of(&b_name, &mut b)])?;
        // values[i, j] += scale · Σ left[i, k] · right[k, j]
        let (left, right, columns) = match self.transposed {
            false => (b, a, ad.inp),
            true => (transpose(&a, ad.rank), transpose(&b, ad.out), ad.out),
        };
        let mut sums = vec![0f32; columns];
        let (mut at, end) = (start as usize, start as usize + values.len());
        let mut rest = values;
        while at < end {
            let (row, from) = (at / columns, at % columns);
            let to = columns.min(from + end - at);
            let (now, later) = std::mem::take(&mut rest).split_at_mut(to - from);
            add_row(now, &mut sums, &left[row * ad.rank..][..ad.rank], &right, columns, from..to, self.scale);
            (rest, at) = (later, at + to - from);
        }
        Ok(())
    }
}

/// Columns `range` of one row.
fn add_row(
    values: &mut [f32],
    sums: &mut [f32],
    left: &[f32],
    right: &[f32],
    columns: usize,
    range: Range<usize>,
    scale: f32,
) {
    let sums = &mut sums[..range.len()];
    sums.fill(0.0);
    for (l, right) in left.iter().zip(right.chunks_exact(columns)) {
        sums.iter_mut().zip(&right[range.clone()]).for_each(|(s, r)| *s += l * r);
    }
    values.iter_mut().zip(sums).for_each(|(v, s)| *v += scale * *s);
}

/// `[rows, n]` to `[n, rows]`.
fn transpose(x: &[f32], rows: usize) -> Vec<f32> {
    let n = x.len() / rows.max(1);
    (0..x.len()).map(|i| x[i % rows * n + i / rows]).collect()
}

impl Source for Merged<'_> {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        self.inner.tensors().into_iter().filter(|t| !is_adapter(&t.name)).collect()
    }

    fn read_many(&self, requests: &mut [Request<'_>]) -> Result<()> {
        self.inner.read_many(requests)?;
        for r in requests.iter_mut().filter(|r| r.role == Role::Weight && !r.out.is_empty()) {
            if let Some(adapter) = self.adapters.get(r.name) {
                self.merge(r.name, adapter, r.start_element, r.out)?;
            }
        }
        Ok(())
    }

    fn read_raw(&self, name: &str, role: Role, start_element: u64, out: &mut [u8]) -> Result<()> {
        self.inner.read_raw(name, role, start_element, out)
    }

    fn step(&self) -> Option<u64> {
        self.inner.step()
    }

    fn state(&self) -> TrainingState {
        self.inner.state()
    }

    fn tokens(&self) -> Option<u64> {
        self.inner.tokens()
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        self.inner.hf_config()
    }

    fn texts(&self) -> &[TextFile] {
        self.inner.texts()
    }
}
