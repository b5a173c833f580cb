// expert_token.cu as a function of the host: it takes what expert_rows.cu does.
#define expert_rows expert_token
#include "expert_rows.cpp"
