//! Selects what is exported from a checkpoint with LoRA adapters: only the adapters, or full
//! weights into which the adapters are merged.
use crate::catalog::{F32ReadRequest, TensorInfo, TensorSource, TextFile, TrainingState};
use crate::error::{CkptError, DamageReason, OptionProblem, Result};
use crate::format_constants::ADAPTER_CONFIG_FILE;
use crate::gather::plan::{GENERATION_CONFIG_FILE, encode_pretty_json};
use crate::layout::peft::{
    AdapterConfig, PEFT_NAME_PREFIX, adapted_weight_name, is_lora_matrix, lora_matrix_names,
};
use crate::tensor::{Dtype, TensorRole};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

/// A wrapper of a checkpoint with LoRA adapters that reads either only the adapters, or the full
/// weights into which the adapters are merged.
pub(super) struct AdapterView<'a> {
    inner: &'a dyn TensorSource,
    content: ViewContent,
}

/// The tensors that an [`AdapterView`] returns to readers: only the LoRA adapters, or the weights
/// with merged adapters.
enum ViewContent {
    /// The adapters alone, with the tensor names of PEFT's files, and the text files next to them.
    Adapters { texts: Vec<TextFile> },
    /// All weights of the model. Every read of an adapted matrix adds the adapter to its elements.
    Merged {
        /// Maps the name of each adapted matrix to the shape of its adapter.
        adapters: HashMap<String, AdapterShape>,
        scale: f32,
        /// Whether matrices have shape `[in, out]` instead of `[out, in]`.
        transposed: bool,
    },
}

/// Wraps a checkpoint with LoRA adapters so that readers get the merged weights if `merge` is true,
/// and otherwise only the adapters. Returns `None` if the checkpoint has no adapters.
///
/// # Errors
/// Fails if `merge` is true and the checkpoint has no adapters, if the adapter config is not
/// supported, or if the shape of an adapter does not match its matrix.
pub(super) fn open_adapter_view(inner: &dyn TensorSource, merge: bool) -> Result<Option<AdapterView<'_>>> {
    let damaged = |reason: DamageReason| CkptError::damaged(inner.path(), ADAPTER_CONFIG_FILE, reason);
    let Some(adapter) = inner.adapter_config() else {
        return match merge {
            true => {
                let path = inner.path().to_owned();
                Err(CkptError::invalid_option(OptionProblem::NoAdapters { path }))
            }
            false => Ok(None),
        };
    };
    let map = adapter.as_object().ok_or_else(|| damaged("not a JSON object".into()))?;
    let config = AdapterConfig::parse_object(map).map_err(|e| damaged(e.into()))?;
    let content = match merge {
        true => ViewContent::Merged {
            adapters: collect_adapters(inner, &config)?,
            scale: config.output_scale() as f32,
            transposed: config.fan_in_fan_out,
        },
        false => {
            // the tokenizer is kept, since training may have extended it
            let is_kept = |t: &&TextFile| t.name != GENERATION_CONFIG_FILE;
            let config = TextFile { name: ADAPTER_CONFIG_FILE.into(), text: encode_pretty_json(adapter)? };
            let others = inner.exported_text_files().iter().filter(is_kept).cloned();
            ViewContent::Adapters { texts: std::iter::once(config).chain(others).collect() }
        }
    };
    Ok(Some(AdapterView { inner, content }))
}

/// The shape of the LoRA adapter of one matrix: A is `[rank, in_features]`, B is `[out_features,
/// rank]`.
struct AdapterShape {
    rank: usize,
    in_features: usize,
    out_features: usize,
}

/// Returns a map from the name of each matrix with a LoRA adapter in the checkpoint `inner` to the
/// shape of this adapter. Fails if the shape of an adapter does not match its matrix or the rank in
/// `config`.
fn collect_adapters(
    inner: &dyn TensorSource,
    config: &AdapterConfig,
) -> Result<HashMap<String, AdapterShape>> {
    let tensors = inner.tensors();
    let weights = tensors.iter().filter(|t| t.role == TensorRole::Weight);
    let shapes: HashMap<&str, &[u64]> = weights.map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
    let mut adapters = HashMap::new();
    for matrix in shapes.keys().filter_map(|name| adapted_weight_name(name)) {
        let [a, b] = lora_matrix_names(&matrix).unwrap_or_default();
        let wrong = || {
            CkptError::damaged(
                inner.path(),
                ADAPTER_CONFIG_FILE,
                format!("the shape of the adapter of {matrix} does not match the matrix"),
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
        adapters.insert(matrix, AdapterShape { rank, in_features: inp, out_features: out });
    }
    Ok(adapters)
}

impl AdapterShape {
    /// Merges a LoRA adapter into elements of the weight `name`: adds `scale` × B · A to `values`,
    /// which begin with the element at index `start`. Reads the adapter from `source`. Transposes B
    /// · A if the matrix is `[in, out]`.
    fn add_to_matrix(
        &self,
        source: &dyn TensorSource,
        name: &str,
        (scale, transposed): (f32, bool),
        start: u64,
        values: &mut [f32],
    ) -> Result<()> {
        let ad = self;
        let [a_name, b_name] = lora_matrix_names(name).unwrap_or_default();
        let (mut a, mut b) = (vec![0f32; ad.rank * ad.in_features], vec![0f32; ad.out_features * ad.rank]);
        let request = |name, out| F32ReadRequest { name, role: TensorRole::Weight, start_element: 0, out };
        source.read_verified(&mut [request(&a_name, &mut a), request(&b_name, &mut b)])?;
        // values[i, j] += scale · Σ left[i, k] · right[k, j]
        let (left, right, columns) = match transposed {
            false => (b, a, ad.in_features),
            true => (transpose_matrix(&a, ad.rank), transpose_matrix(&b, ad.out_features), ad.out_features),
        };
        let mut sums = vec![0f32; columns];
        let (mut at, end) = (start as usize, start as usize + values.len());
        let mut rest = values;
        while at < end {
            let (row, from) = (at / columns, at % columns);
            let to = columns.min(from + end - at);
            let (row_values, later) = std::mem::take(&mut rest).split_at_mut(to - from);
            add_matmul_row(
                row_values,
                &mut sums,
                &left[row * ad.rank..][..ad.rank],
                &right,
                columns,
                from..to,
                scale,
            );
            (rest, at) = (later, at + to - from);
        }
        Ok(())
    }
}

/// Computes the columns `range` of one row of the matmul `left` · `right`, multiplies them by
/// `scale`, and adds the results to `values`. `left` is the same row of the left matrix, and
/// `right` is the whole right matrix with `columns` columns. `sums` is scratch memory with at least
/// as many elements as `range`, and is overwritten.
fn add_matmul_row(
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

/// Returns the transpose of a row-major matrix with `rows` rows.
fn transpose_matrix(x: &[f32], rows: usize) -> Vec<f32> {
    let n = x.len() / rows.max(1);
    (0..x.len()).map(|i| x[i % rows * n + i / rows]).collect()
}

impl TensorSource for AdapterView<'_> {
    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        let tensors = self.inner.tensors().into_iter();
        match &self.content {
            ViewContent::Merged { .. } => tensors.filter(|t| !is_lora_matrix(&t.name)).collect(),
            ViewContent::Adapters { .. } => {
                let adapters = tensors.filter(|t| t.role == TensorRole::Weight && is_lora_matrix(&t.name));
                adapters.map(|t| TensorInfo { name: format!("{PEFT_NAME_PREFIX}{}", t.name), ..t }).collect()
            }
        }
    }

    fn read_verified(&self, requests: &mut [F32ReadRequest<'_>]) -> Result<()> {
        let ViewContent::Merged { adapters, scale, transposed } = &self.content else {
            let mut renamed: Vec<F32ReadRequest<'_>> = requests
                .iter_mut()
                .map(|r| F32ReadRequest {
                    name: r.name.strip_prefix(PEFT_NAME_PREFIX).unwrap_or(r.name),
                    role: r.role,
                    start_element: r.start_element,
                    out: &mut *r.out,
                })
                .collect();
            return self.inner.read_verified(&mut renamed);
        };
        self.inner.read_verified(requests)?;
        for r in requests.iter_mut().filter(|r| r.role == TensorRole::Weight && !r.out.is_empty()) {
            if let Some(adapter) = adapters.get(r.name) {
                let factors = (*scale, *transposed);
                adapter.add_to_matrix(self.inner, r.name, factors, r.start_element, r.out)?;
            }
        }
        Ok(())
    }

    fn read_raw(&self, name: &str, role: TensorRole, start_element: u64, out: &mut [u8]) -> Result<()> {
        let name = match self.content {
            ViewContent::Adapters { .. } => name.strip_prefix(PEFT_NAME_PREFIX).unwrap_or(name),
            ViewContent::Merged { .. } => name,
        };
        self.inner.read_raw(name, role, start_element, out)
    }

    fn default_export_dtype(&self) -> Dtype {
        match self.content {
            ViewContent::Adapters { .. } => self.inner.default_export_dtype(),
            ViewContent::Merged { .. } => Dtype::F32,
        }
    }

    fn completed_steps(&self) -> Option<u64> {
        self.inner.completed_steps()
    }

    fn training_state(&self) -> TrainingState {
        self.inner.training_state()
    }

    fn trained_token_count(&self) -> Option<u64> {
        self.inner.trained_token_count()
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        self.inner.hf_config().filter(|_| matches!(self.content, ViewContent::Merged { .. }))
    }

    fn exported_text_files(&self) -> &[TextFile] {
        match &self.content {
            ViewContent::Adapters { texts } => texts,
            ViewContent::Merged { .. } => self.inner.exported_text_files(),
        }
    }
}
