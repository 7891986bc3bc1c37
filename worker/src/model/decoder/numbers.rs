//! What families say of a decoder: read of config.json, and written there for a model that job.yaml describes.
use super::experts::{ExpertNames, ExpertNumbers};
use crate::{
    model::{
        config::Fields,
        experts::{ExpertShape, losses},
        rotary::Rope,
    },
    params::Init,
};
use contract::job::{ExpertsSpec, ModelSpec};
use serde_json::{Map, Value, json};

/// Rate of dropout in config.json: of attention's probabilities.
pub(in crate::model) const DROPOUT: &str = "attention_dropout";

/// What a family says of a model.
pub(in crate::model) struct Numbers {
    pub(in crate::model) vocab: usize,
    pub(in crate::model) hidden: usize,
    pub(in crate::model) intermediate: usize,
    pub(in crate::model) layers: usize,
    pub(in crate::model) heads: usize,
    pub(in crate::model) kv_heads: usize,
    pub(in crate::model) head_dim: usize,
    pub(in crate::model) eps: f32,
    pub(in crate::model) rope: Rope,
    pub(in crate::model) tied: bool,
    /// Standard deviation of initial matrices.
    pub(in crate::model) std: f32,
    /// Biases of the q, k and v projections.
    pub(in crate::model) qkv_bias: bool,
    /// Bias of attention's output projection.
    pub(in crate::model) o_bias: bool,
    /// Biases of gate, up and down.
    pub(in crate::model) mlp_bias: bool,
    /// RMSNorm of each head of q and k, before the rotation.
    pub(in crate::model) qk_norm: bool,
    /// Norms multiply by 1 + their weight, not by their weight.
    pub(in crate::model) norms_from_one: bool,
    /// Attention's and the MLP's outputs have norms of their own.
    pub(in crate::model) output_norms: bool,
    /// The MLP's gate is GELU (tanh form), not SiLU.
    pub(in crate::model) gelu: bool,
    /// Factor of embedded tokens.
    pub(in crate::model) embedding_scale: Option<f32>,
    /// Factor of attention's scores.
    pub(in crate::model) attention_scale: f32,
    /// Attention's scores s become cap·tanh(s / cap).
    pub(in crate::model) attention_cap: Option<f32>,
    /// The same of the logits.
    pub(in crate::model) logit_cap: Option<f32>,
    /// Share of attention's probabilities that is dropped.
    pub(in crate::model) dropout: f64,
    /// Rotation of sliding layers, where it isn't that of the others.
    pub(in crate::model) sliding_rope: Option<Rope>,
    /// The token whose embedding learns nothing where it is an input.
    pub(in crate::model) padding: Option<u32>,
    /// Tokens that a token of a sliding layer attends to, itself included.
    pub(in crate::model) window: Option<usize>,
    /// Of each layer: does it attend to the window alone?
    pub(in crate::model) sliding: Vec<bool>,
    /// Of a model with experts.
    pub(in crate::model) experts: Option<ExpertNumbers>,
}

impl Numbers {
    /// The fields that all these families have, checked against each other.
    pub(in crate::model) fn read(f: &Fields) -> Result<Self, String> {
        f.only("hidden_act", &[json!("silu"), json!("swish")])?;
        Self::read_but_activation(f, f.rope()?)
    }

    /// As [`Numbers::read`], all but `hidden_act` and the rotation.
    pub(in crate::model) fn read_but_activation(f: &Fields, rope: Rope) -> Result<Self, String> {
        let dropout = f.dropout(DROPOUT, 0.0)?;
        f.only("pretraining_tp", &[json!(1)])?;
        f.only("is_encoder_decoder", &[json!(false)])?;
        f.only("add_cross_attention", &[json!(false)])?;
        f.only("chunk_size_feed_forward", &[json!(0)])?;
        f.only("partial_rotary_factor", &[json!(1)])?;
        let (hidden, heads) = (f.size("hidden_size")?, f.size("num_attention_heads")?);
        let kv_heads = f.opt_size("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
            ));
        }
        let head_dim = match f.opt_size("head_dim")? {
            Some(n) => n,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(format!("num_attention_heads {heads} does not divide hidden_size {hidden}")),
        };
        if !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim {head_dim} is odd; rotary embedding needs pairs"));
        }
        f.size("max_position_embeddings")?;
        let layers = f.layers("num_hidden_layers")?;
        let vocab = f.size("vocab_size")? as usize;
        Ok(Numbers {
            vocab,
            hidden: hidden as usize,
            intermediate: f.size("intermediate_size")? as usize,
            layers,
            heads: heads as usize,
            kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
            eps: f.positive("rms_norm_eps", 1e-6)? as f32,
            rope,
            tied: f.flag("tie_word_embeddings")?,
            std: f.positive("initializer_range", 0.02)? as f32,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            norms_from_one: false,
            output_norms: false,
            gelu: false,
            embedding_scale: None,
            attention_scale: (1.0 / f64::from(head_dim).sqrt()) as f32,
            attention_cap: None,
            dropout,
            logit_cap: None,
            sliding_rope: None,
            padding: padding(f, vocab),
            window: None,
            sliding: vec![false; layers],
            experts: None,
        })
    }

    /// The fields that families with experts share; every layer has `count` experts of this width, unless the family says
    /// otherwise afterwards.
    pub(in crate::model) fn read_experts(
        &mut self,
        f: &Fields,
        count: u32,
        intermediate: usize,
        names: ExpertNames,
    ) -> Result<(), String> {
        let per_token = f.size("num_experts_per_tok")?;
        if per_token > count {
            return Err(format!(
                "num_experts_per_tok {per_token} is more than the {count} experts of a layer"
            ));
        }
        if count > EXPERTS_MAX {
            return Err(format!("{count} experts of a layer are more than {EXPERTS_MAX}"));
        }
        // It asks for the routers' logits beside a text's; how training uses them is said by `train.experts`.
        f.flag("output_router_logits")?;
        let aux = f.opt_number("router_aux_loss_coef")?.unwrap_or(0.001);
        if aux < 0.0 {
            return Err(format!("config.json: `router_aux_loss_coef` is {aux}, below 0"));
        }
        let (experts, per_token, hidden) = (count as usize, per_token as usize, self.hidden);
        let shape = ExpertShape { experts, per_token, hidden, intermediate, normalise: false };
        let losses = losses(&ExpertsSpec::default(), aux);
        self.experts = Some(ExpertNumbers { shape, losses, sparse: vec![true; self.layers], names });
        Ok(())
    }

    /// What norms' weights begin with.
    pub(super) fn norm_init(&self) -> Init {
        if self.norms_from_one { Init::Zeros } else { Init::Ones }
    }

    /// The fields by which Qwen says which layers slide.
    pub(in crate::model) fn read_sliding_layers(&mut self, f: &Fields) -> Result<(), String> {
        let on = f.flag("use_sliding_window")?;
        let window = f.opt_size("sliding_window")?.filter(|_| on);
        let first = f.get("max_window_layers").map_or(Some(28), Value::as_u64);
        let first = first.ok_or("config.json: `max_window_layers` is not a number of layers")?;
        self.window = window.map(|n| n as usize);
        self.sliding = (0..self.layers).map(|l| window.is_some() && l as u64 >= first).collect();
        self.read_layer_types(f)
    }

    /// `layer_types`, where it is there, says which layers slide.
    pub(in crate::model) fn read_layer_types(&mut self, f: &Fields) -> Result<(), String> {
        let window = self.window;
        let Some(types) = f.get("layer_types") else { return Ok(()) };
        let wrong =
            "config.json: `layer_types` is not `full_attention` or `sliding_attention` for each layer";
        let types = types.as_array().filter(|t| t.len() == self.layers).ok_or(wrong)?;
        for (sliding, kind) in self.sliding.iter_mut().zip(types) {
            *sliding = match kind.as_str() {
                Some("full_attention") => false,
                Some("sliding_attention") if window.is_some() => true,
                Some("sliding_attention") => {
                    return Err("config.json: `layer_types` has sliding layers without a window".into());
                }
                _ => return Err(wrong.into()),
            };
        }
        Ok(())
    }
}

/// More experts than this are no layer.
const EXPERTS_MAX: u32 = 1 << 16;

/// `pad_token_id` as torch's embedding takes it: a negative one counts from the end.
fn padding(f: &Fields, vocab: usize) -> Option<u32> {
    let id = f.get("pad_token_id")?.as_i64()?;
    let id = if id < 0 { id.checked_add(vocab as i64)? } else { id };
    u32::try_from(id).ok()
}

/// `config.json` of a model that job.yaml describes, all but what the family adds.
pub(in crate::model) fn describe(
    s: &ModelSpec,
    model_type: &str,
    architecture: &str,
    own: Value,
) -> Map<String, Value> {
    let shared = json!({
        "architectures": [architecture],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden_size,
        "initializer_range": s.initializer_range,
        "intermediate_size": s.intermediate_size,
        "max_position_embeddings": s.max_position_embeddings,
        "num_attention_heads": s.num_attention_heads,
        "num_hidden_layers": s.num_hidden_layers,
        "num_key_value_heads": s.num_key_value_heads,
        "rms_norm_eps": s.rms_norm_eps,
        "rope_theta": s.rope_theta,
        "rope_scaling": null,
        "tie_word_embeddings": s.tie_word_embeddings,
        "use_cache": true,
        "vocab_size": s.vocab_size,
    });
    let entries = |v: Value| match v {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    let mut map = entries(shared);
    map.extend(entries(own));
    map
}
