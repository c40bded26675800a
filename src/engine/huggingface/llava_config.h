#pragma once
#include <string>

#include "core/dtype.h"
#include "engine/huggingface/huggingface_config.h"

// The config.json of a model that sees images: transformers' LlavaForConditionalGeneration, with CLIP's or SigLIP's
// tower and a language model of some families.
namespace parka {

inline constexpr const char* kLlavaModelType = "llava";
inline constexpr const char* kLlavaArchitecture = "LlavaForConditionalGeneration";

// The preprocessor of pictures in the model's folder: its own file, or nested in the second, which is read first.
inline constexpr const char *kPreprocessorName = "preprocessor_config.json",
                            *kProcessorName = "processor_config.json", *kNestedProcessorKey = "image_processor";
// The processor in either file, which may be no object.
const json& image_processor_in(const json& file);

// Like parse_huggingface_config(), for a config.json whose model_type is kLlavaModelType. The family is the
// language model's. Mean and deviation of pixels are those that towers of the kind are trained with.
HuggingFaceModel parse_llava_config(const json& config, const std::string& where,
                                    std::span<const HuggingFaceFamily> families);

// Like make_huggingface_config(), with a tower. Throws Error(kBadInput) for a projector that it has not.
std::string make_llava_config(const HuggingFaceModel& model, DType dtype, const json* origin);

// The files of VILA 1.5's folder beside language model and tower: the config.json of the whole, from that of an
// import, if there is one, and the projector's. Throws Error(kBadInput) for a projector that VILA 1.5 lacks.
std::string make_vila_config(const VisionConfig& vision, const json* origin);
std::string make_vila_projector_config();
std::string make_tower_config(const TowerConfig& tower, DType dtype);

// The tower that a vision_config, or a tower's config.json, describes; its hidden state is the last but one.
TowerConfig parse_tower_config(const json& config, const std::string& where);

// Sets mean and deviation of pixels to those of published towers of its kind.
void set_usual_statistics(TowerConfig& tower);

// Sets mean and deviation of pixels where kPreprocessorName or kProcessorName in the model's folder says them.
// Throws Error(kBadInput) for pixels that are scaled otherwise than by 1 / 255, and for pictures that become
// squares of another size than tower.image_size, or by another filter than a bicubic one.
void read_pixel_statistics(const std::string& folder, TowerConfig& tower);

// Throws Error(kBadInput) of the `model` that is exported unless what is read of the folder is the tower's mean and
// deviation. They come from a file that goes along: where it says others, or is not there, it is another model.
void require_pixel_statistics(const std::string& folder, const TowerConfig& tower, const std::string& model);

}  // namespace parka
