//! Gemma 2 and the text models of Gemma 3: norms that multiply by 1 + w before and after each half of a layer, scaled
//! embeddings, GeGLU, sliding layers among full ones; capped scores and logits in Gemma 2, q/k norms and a rotation of the
//! sliding layers' own in Gemma 3.
use super::{Family, config::Fields, decoder, rotary::Rope};
use contract::job::ModelSpec;
use serde_json::{Map, Value, json};

pub(super) const GEMMA2: Family = Family {
    name: "gemma2",
    architecture: "Gemma2ForCausalLM",
    build: |config, tokens| {
        let f = Fields::new(config);
        let mut n = read(config, &f, 2)?;
        n.attention_cap = cap(config, &f, "attn_logit_softcapping", Some(50.0))?;
        n.logit_cap = cap(config, &f, "final_logit_softcapping", Some(30.0))?;
        f.finish()?;
        Ok(decoder::build(n, config, tokens))
    },
    describe: |spec| {
        let own =
            json!({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096});
        describe(spec, "gemma2", "Gemma2ForCausalLM", own)
    },
    dropout: &[decoder::DROPOUT],
};

pub(super) const GEMMA3: Family = Family {
    name: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    build: |config, tokens| {
        let f = Fields::new(config);
        let (old, new) = (f.opt_size("sliding_window_pattern")?, f.opt_size("_sliding_window_pattern")?);
        let pattern = old.or(new).unwrap_or(6) as usize;
        let mut n = read(config, &f, pattern)?;
        // transformers reads this key and then computes without it
        f.only("attn_logit_softcapping", &[Value::Null])?;
        n.logit_cap = cap(config, &f, "final_logit_softcapping", None)?;
        n.qk_norm = true;
        f.finish()?;
        Ok(decoder::build(n, config, tokens))
    },
    describe: |spec| {
        let rope = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
        let parameters = json!({"full_attention": rope(spec.rope_theta), "sliding_attention": rope(10000.0)});
        let own = json!({"sliding_window": 512, "sliding_window_pattern": 6, "rope_parameters": parameters});
        let mut config = describe(spec, "gemma3_text", "Gemma3ForCausalLM", own);
        for key in ["rope_theta", "rope_scaling"] {
            config.remove(key);
        }
        config
    },
    dropout: &[decoder::DROPOUT],
};

/// What both have; without `layer_types` every `pattern`-th layer attends to the whole document.
fn read(config: &Map<String, Value>, f: &Fields, pattern: usize) -> Result<decoder::Numbers, String> {
    let gelu = json!("gelu_pytorch_tanh");
    f.only("hidden_act", std::slice::from_ref(&gelu))?;
    f.only("hidden_activation", &[gelu])?;
    f.only("attention_bias", &[json!(false)])?;
    f.only("use_bidirectional_attention", &[json!(false)])?;
    f.get("cache_implementation");
    // Its default isn't hidden_size / num_attention_heads, so that a file without it is not complete.
    f.size("head_dim")?;
    let two_ropes = config.get("architectures") == Some(&json!([GEMMA3.architecture]));
    let (rope, sliding_rope) = if two_ropes { ropes(f)? } else { (f.rope()?, None) };
    let mut n = decoder::Numbers::read_but_activation(f, rope)?;
    n.sliding_rope = sliding_rope;
    (n.norms_from_one, n.output_norms, n.gelu) = (true, true, true);
    n.tied = f.flag_or("tie_word_embeddings", true)?;
    n.embedding_scale = Some((n.hidden as f64).sqrt() as f32);
    n.attention_scale = (1.0 / f.positive("query_pre_attn_scalar", 256.0)?.sqrt()) as f32;
    let window =
        if config.contains_key("sliding_window") { f.opt_size("sliding_window")? } else { Some(4096) };
    n.window = window.map(|w| w as usize);
    n.sliding = (0..n.layers).map(|l| window.is_some() && (l + 1) % pattern != 0).collect();
    n.read_layer_types(f)?;
    Ok(n)
}

/// A cap: null is none, and an absent key the family's own.
fn cap(
    config: &Map<String, Value>,
    f: &Fields,
    key: &'static str,
    absent: Option<f64>,
) -> Result<Option<f32>, String> {
    let own = if config.contains_key(key) { None } else { absent };
    match f.opt_number(key)?.or(own).map(|x| x as f32) {
        Some(cap) if cap <= 0.0 => Err(format!("config.json: `{key}` is {cap}, not above 0")),
        cap => Ok(cap),
    }
}

/// Rotation of full and of sliding layers, by the names of transformers 5 or 4.
fn ropes(f: &Fields) -> Result<(Rope, Option<Rope>), String> {
    const NEW: &str = "rope_parameters";
    let (theta, local) = (f.positive("rope_theta", 1e6)?, f.positive("rope_local_base_freq", 1e4)?);
    let old = f.get("rope_scaling");
    let Some(both) = f.get(NEW) else {
        let full = old.map_or(Ok(Rope::plain(theta)), |v| Rope::read("rope_scaling", v, theta))?;
        return Ok((full, Some(Rope::plain(local))));
    };
    let wrong =
        || format!("config.json: `{NEW}` is not `full_attention` and `sliding_attention` of this model");
    let map = both.as_object().filter(|m| m.len() == 2).ok_or_else(wrong)?;
    let of = |kind: &str, theta| Rope::read(NEW, map.get(kind).ok_or_else(wrong)?, theta);
    match old {
        Some(_) => {
            Err(format!("config.json: `rope_scaling` stands beside `{NEW}`; keep the one that is meant"))
        }
        None => Ok((of("full_attention", theta)?, Some(of("sliding_attention", local)?))),
    }
}

/// `config.json` of a model that job.yaml describes.
fn describe(spec: &ModelSpec, model_type: &str, architecture: &str, own: Value) -> Map<String, Value> {
    let mut config = decoder::describe(spec, model_type, architecture, own);
    config.remove("hidden_act");
    config.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
    config.insert("query_pre_attn_scalar".into(), spec.head_dim.into());
    config
}
